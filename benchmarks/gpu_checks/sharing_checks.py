"""Checks of a GPU that processes share: what an engine takes of it by itself, and whether NVIDIA's MPS can be started."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from gpu_checks.counts import kv_bytes_per_token
from gpu_checks.engine_checks import DEFAULTS, generate, prompts, weights
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from gpu_checks.token_ids import TokenIds
from rollout_workers.inference.engine import MegatronEngine

SHARE = 0.4
MPS = "nvidia-cuda-mps-control"
TASK = "import torch; print(torch.ones(8, device='cuda').sum().item())"


def cache(machine: Machine, report: Report) -> None:
    """An engine with `kv_cache_gb: auto` keeps within its share, also with all generations running and new weights arriving."""
    shape = QWEN3_600M if machine.is_gpu else SMALL
    before = torch.cuda.mem_get_info(machine.device) if machine.is_gpu else (0, 0)
    kv_gib = asyncio.run(_auto(machine, shape, report))
    report.note(kv_gib=kv_gib)
    if machine.is_gpu:
        free, total = before
        peak = torch.cuda.max_memory_reserved(machine.device)
        report.note(free_before_gib=free / 2**30, reserved_share=peak / total)
        report.at_most("used_share", (peak + _of_context(machine)) / total, SHARE)


def _of_context(machine: Machine) -> float:
    """What this process has on the GPU besides torch's memory, if it is alone there."""
    free, total = torch.cuda.mem_get_info(machine.device)
    return total - free - torch.cuda.memory_reserved(machine.device)


async def _auto(machine: Machine, shape: ModelShape, report: Report) -> float:
    dtype = parallel.resolve_dtype(machine.device)
    full = weights(machine, shape, dtype, seed=1)
    worker = WorkerConfig(kv_cache_gb="auto", gpu_share=SHARE, max_running=64 if machine.is_gpu else 4)
    tokenizer = TokenIds(shape.vocab_size)
    async with MegatronEngine(shape, tokenizer, worker, DEFAULTS, device=machine.device, seed=7, dtype=dtype) as running:
        await running.swap(0, full)
        asked = prompts(worker.max_running, shape.vocab_size, longest=200)
        found = await generate(running, asked, [32] * len(asked))
        await running.swap(1, full)
        report.require([len(each.token_ids) for each in found] == [32] * len(asked), "a generation ended early")
        return running.metrics.kv_blocks * worker.kv_block_tokens * kv_bytes_per_token(shape, dtype) / 2**30


def mps(machine: Machine, report: Report) -> None:
    """Compute in another process under a control daemon that is started for it; one that already runs is left alone."""
    machine.require_memory("MPS", gib=1)
    if shutil.which(MPS) is None:
        report.note(starts=f"no ({MPS} is not installed)")
        return
    report.attempt("starts", _under_mps)


def _under_mps() -> str:
    with mps_daemon() as variables:
        done = subprocess.run(
            [sys.executable, "-c", TASK], env=variables, capture_output=True, text=True, timeout=60, check=True
        )
        servers = _told("get_server_list", variables)
        return (
            "yes" if done.stdout.strip() == "8.0" and servers else f"no (computed {done.stdout.strip()}, servers: {servers!r})"
        )


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run a control daemon of MPS of our own. Yields the environment of its clients."""
    with tempfile.TemporaryDirectory(prefix="mps_") as folder:
        variables = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=variables, capture_output=True, text=True, timeout=20, check=True)
        try:
            yield variables
        finally:
            _told("quit", variables)


def _told(order: str, variables: dict[str, str]) -> str:
    done = subprocess.run([MPS], input=order, env=variables, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


CHECKS: Checks = {"auto cache": cache, "mps": mps}
