"""Decoding: the share of the memory bandwidth that each batch size reaches, swaps of weights, distance from the learner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from gpu_checks.ceilings import copy_bytes_per_s
from gpu_checks.decoding import Decoder
from gpu_checks.engine_checks import engine, generate, mismatch, prompts, weights
from gpu_checks.one_check import Skipped
from gpu_checks.report import QWEN3_600M, SMALL, Check, Checks, Machine, Report
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.megatron.engine.async_scheduling import async_schedule_mode
from async_rl.models.shape import ModelShape
from async_rl.types import Completion
from gpu_bench_parts.goals import DECODED, share_of_copy
from gpu_bench_parts.models import QWEN3

DECODING_GIB = {"0.6B": 60, "1.7B": 35, "4B": 50, "8B": 75}
SWAP_GIB = {"0.6B": 16, "8B": 60}
"""Of GPU memory that a measurement needs."""


def decode(size: str, machine: Machine, report: Report) -> None:
    """Steps in which all requests decode, at contexts of 512 and 4096 tokens."""
    shape, pairs, steps = SMALL, [(1, 16), (4, 16), (1, 64), (4, 64)], 4
    if machine.is_gpu:
        machine.require_memory(f"decoding {size}", gib=DECODING_GIB[size])
        shape, pairs, steps = replace(QWEN3[size], max_positions=8192), [*DECODED[size]], 32
    ceiling = copy_bytes_per_s(machine)
    report.note(copy_gb_s=ceiling / 1e9)
    decoder = Decoder(machine, shape, room_for=[(batch, prompt + 256) for batch, prompt in pairs])
    report.note(kernel=decoder.core.kernel, graphs=float(decoder.core.graphs is not None))
    for batch, prompt in pairs:
        found = decoder.measure(batch, prompt, steps=steps)
        tokens = {f"batch_{batch}_context_{prompt}_tokens_per_s": found.tokens_per_s}
        report.note(**tokens, **{share_of_copy(batch, prompt): found.bytes_per_s / ceiling})


def scheduling(machine: Machine, report: Report) -> None:
    """Steps in which all requests decode, with asynchronous scheduling and without: what it hides of the host's time."""
    if async_schedule_mode() is None:
        raise Skipped("this megatron-core has no asynchronous scheduling")
    shape, prompt, batches, steps = SMALL, 16, (4,), 4
    if machine.is_gpu:
        machine.require_memory("decoding 0.6B", gib=DECODING_GIB["0.6B"])
        shape, prompt, batches, steps = replace(QWEN3["0.6B"], max_positions=8192), 512, (1, 8, 64, 256), 64
    step_ms: dict[bool, list[float]] = {}
    for is_async in (False, True):
        decoder = Decoder(machine, shape, room_for=[(max(batches), prompt + 256)], async_scheduling=is_async)
        step_ms[is_async] = [1e3 * decoder.measure(batch, prompt, steps=steps).step_s for batch in batches]
        decoder.core.close()
    for batch, plain, ahead in zip(batches, step_ms[False], step_ms[True], strict=True):
        report.note(
            **{f"batch_{batch}_ms": plain, f"batch_{batch}_async_ms": ahead, f"batch_{batch}_times_faster": plain / ahead}
        )


def swap(size: str, machine: Machine, report: Report) -> None:
    """Weights that are on the device already are copied into the engine between two steps."""
    if machine.is_gpu:
        machine.require_memory(f"a swap of {size}", gib=SWAP_GIB[size])
    decoder = Decoder(machine, QWEN3[size] if machine.is_gpu else SMALL, room_for=[(16, 512)])
    weights = decoder.random_weights(seed=2)
    given = sum(each.numel() * each.element_size() for each in weights.values())
    running = decoder.start(16, 64, tokens=128)
    decoder.steps(8)
    spent: list[float] = []
    for version in range(1, 6):
        machine.synchronize()
        started = time.perf_counter()
        decoder.core.swap(version, weights)
        machine.synchronize()
        spent.append(time.perf_counter() - started)
        decoder.steps(4)
    decoder.finish(running)
    swap_s = sorted(spent)[2]
    report.note(weights_gb=given / 1e9, swap_ms=1e3 * swap_s, swap_tb_s=given / swap_s / 1e12, worst_swap_ms=1e3 * max(spent))


def gap(machine: Machine, report: Report) -> None:
    """Differences between the log-probabilities of engine and learner, with a real vocabulary and the device's precision."""
    shape, dtype = QWEN3_600M if machine.is_gpu else SMALL, parallel.resolve_dtype(machine.device)
    full = weights(machine, shape, dtype, seed=1)
    asked = prompts(32 if machine.is_gpu else 4, shape.vocab_size, longest=256)
    found = asyncio.run(_sampled(machine, shape, full, asked))
    differences = mismatch(machine, shape, dtype, full, asked, found)
    report.note(mean=differences.mean().item(), largest=differences.max().item(), tokens=len(differences))


async def _sampled(machine: Machine, shape: ModelShape, full: Mapping[str, Tensor], asked: list[list[int]]) -> list[Completion]:
    async with engine(machine, shape, kv_cache_gb=6.0 if machine.is_gpu else 0.25) as running:
        await running.swap(0, full)
        return await generate(running, asked, [128 if machine.is_gpu else 16] * len(asked))


def _decode(size: str) -> Check:
    return lambda machine, report: decode(size, machine, report)


def _swap(size: str) -> Check:
    return lambda machine, report: swap(size, machine, report)


CHECKS: Checks = {
    **{f"decode {size}": _decode(size) for size in DECODED},
    **{f"swap {size}": _swap(size) for size in SWAP_GIB},
    "async scheduling": scheduling,
    "gap": gap,
}
