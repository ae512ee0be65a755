"""Decoding: the share of the memory bandwidth that each batch size reaches, swaps of weights, distance from the learner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from gpu_checks.ceilings import copy_bytes_per_s
from gpu_checks.decoding import Decoder
from gpu_checks.engine_checks import engine, generate, mismatch, prompts, weights
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from async_rl.types import Completion

BATCHES = (1, 8, 64, 256, 512)
AT_MOST_TOKENS = 400_000
"""In the cache: 46 GB for Qwen3-0.6B."""


def decode(machine: Machine, report: Report) -> None:
    """Steps in which all requests decode, at contexts of 512 and 4096 tokens."""
    shape = replace(QWEN3_600M, max_positions=8192) if machine.is_gpu else SMALL
    steps, prompts = (32, (512, 4096)) if machine.is_gpu else (4, (16, 64))
    batches = BATCHES if machine.is_gpu else (1, 4)
    sizes = [(batch, prompt) for prompt in prompts for batch in batches if batch * (prompt + 256) <= AT_MOST_TOKENS]
    ceiling = copy_bytes_per_s(machine)
    report.note(copy_gb_s=ceiling / 1e9)
    decoder = Decoder(machine, shape, room_for=[(batch, prompt + 256) for batch, prompt in sizes])
    report.note(kernel=decoder.core.kernel)
    shares: list[float] = []
    for batch, prompt in sizes:
        found = decoder.measure(batch, prompt, steps=steps)
        shares.append(found.bytes_per_s / ceiling)
        name = f"batch_{batch}_context_{prompt}"
        report.note(**{f"{name}_tokens_per_s": found.tokens_per_s, f"{name}_of_copy_bandwidth": shares[-1]})
    report.note(best_of_copy_bandwidth=max(shares))


def swap(machine: Machine, report: Report) -> None:
    """Weights that are on the device already are copied into the engine between two steps."""
    decoder = Decoder(machine, QWEN3_600M if machine.is_gpu else SMALL, room_for=[(16, 512)])
    weights = decoder.random_weights(seed=2)
    size = sum(each.numel() * each.element_size() for each in weights.values())
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
    report.note(weights_gb=size / 1e9, swap_ms=1e3 * swap_s, swap_tb_s=size / swap_s / 1e12, worst_swap_ms=1e3 * max(spent))


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


CHECKS: Checks = {"decode": decode, "swap": swap, "gap": gap}
