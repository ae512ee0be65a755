"""Decoding while a learner's process on the same GPU pushes weights: read in place over CUDA IPC, and through the host."""

from __future__ import annotations

from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from gpu_checks.token_ids import TokenIds
from weights_parts.in_flight import Work, in_flight_figures

from async_rl.config import WireConfig

WAYS = {"in_place": WireConfig(deltas="off"), "gloo": WireConfig(shared_memory=False, deltas="off", bucket_mb=64.0)}


def pushes(machine: Machine, report: Report) -> None:
    """The learner's process trains nothing: what decoding loses is what packing, hashing, sending and the swap take of the
    GPU and of this process.
    """
    tokenizer = TokenIds(QWEN3_600M.vocab_size if machine.is_gpu else SMALL.vocab_size)
    work = (
        Work(shape=QWEN3_600M, tokenizer=tokenizer, device=machine.device, batch=64, tokens=768, kv_cache_gb=8.0)
        if machine.is_gpu
        else Work(shape=SMALL, tokenizer=tokenizer, batch=4, tokens=24, every_s=0.4)
    )
    for name in WAYS if machine.is_gpu else ["in_place"]:
        found = in_flight_figures(2 if machine.is_gpu else 1, WAYS[name], work)
        report.note(**{f"{name}_{figure.removeprefix('in_flight_')}": value for figure, value in found.items()})


CHECKS: Checks = {"pushes": pushes}
