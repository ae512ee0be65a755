"""Checks of the rollout worker's engine: log-probabilities, decoding speed, and swaps under running generations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.heads.logprobs import token_logprobs
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import load_full, local_parameters
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from gpu_checks.ceilings import copy_bytes_per_s
from gpu_checks.counts import kv_bytes_per_token
from gpu_checks.decoding import Decoder
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from gpu_checks.token_ids import TokenIds
from rollout_workers.inference.engine import MegatronEngine

DEFAULTS = GenerationArgs(max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, stop=())
MISMATCH = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (1.0, 0.03)}
"""Largest and mean difference of log-probabilities that count as rounding."""


def engine(
    machine: Machine,
    shape: ModelShape,
    *,
    dtype: torch.dtype | None = None,
    kv_cache_gb: float,
    prompt_tokens: int = 4096,
) -> MegatronEngine:
    worker = WorkerConfig(kv_cache_gb=kv_cache_gb, prompt_tokens_per_step=prompt_tokens)
    return MegatronEngine(shape, TokenIds(shape.vocab_size), worker, DEFAULTS, device=machine.device, seed=7, dtype=dtype)


def weights(machine: Machine, shape: ModelShape, dtype: torch.dtype, seed: int) -> Mapping[str, Tensor]:
    parallel.initialize(device=machine.device)
    model = build_model(shape, device=machine.device, dtype=dtype, seed=seed)
    return {name: parameter.detach() for name, parameter in local_parameters(model).items()}


def prompts(count: int, vocab_size: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


async def generate(running: MegatronEngine, asked: Sequence[list[int]], budgets: Sequence[int]) -> list[Completion]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(running.generate(prompt, GenerationArgs(max_tokens=budget)))
            for prompt, budget in zip(asked, budgets, strict=True)
        ]
    return [task.result() for task in tasks]


def logprobs(machine: Machine, report: Report) -> None:
    """Compare the engine's log-probabilities with the learner's, for concurrent requests of different lengths."""
    for dtype, (largest, mean) in MISMATCH.items():
        name = str(dtype).removeprefix("torch.")
        full = weights(machine, SMALL, dtype, seed=1)
        asked = prompts(40 if machine.is_gpu else 16, SMALL.vocab_size, longest=150)
        budgets = [1 + position % 40 for position in range(len(asked))]
        found = asyncio.run(_sampled(machine, dtype, full, asked, budgets, report))
        difference = mismatch(machine, SMALL, dtype, full, asked, found)
        report.at_most(f"max_{name}", difference.max().item(), largest)
        report.at_most(f"mean_{name}", difference.mean().item(), mean)


async def _sampled(
    machine: Machine, dtype: torch.dtype, full: Mapping[str, Tensor], asked: list[list[int]], budgets: list[int], report: Report
) -> list[Completion]:
    async with engine(machine, SMALL, dtype=dtype, kv_cache_gb=0.5) as running:
        await running.swap(0, full)
        report.note(**{f"kernel_{str(dtype).removeprefix('torch.')}": running.kernel})
        found = await generate(running, asked, budgets)
    report.require([len(each.token_ids) for each in found] == budgets, "a generation did not have the length asked for")
    return found


def mismatch(
    machine: Machine,
    shape: ModelShape,
    dtype: torch.dtype,
    full: Mapping[str, Tensor],
    asked: list[list[int]],
    found: list[Completion],
) -> Tensor:
    model = build_model(shape, device=machine.device, dtype=dtype, seed=0)
    load_full(model, shape, full)
    rows = [torch.tensor([*prompt, *each.token_ids.tolist()]) for prompt, each in zip(asked, found, strict=True)]
    with torch.no_grad():
        output = forward_packed(model, *pack([row.to(machine.device) for row in rows]))
        targets = torch.cat([row.roll(-1) for row in rows]).to(machine.device)
        scores = token_logprobs(output, targets).cpu()
    differences, start = [], 0
    for prompt, each, row in zip(asked, found, rows, strict=True):
        first = start + len(prompt) - 1
        differences.append(scores[first : first + len(each.token_ids)] - torch.from_numpy(each.logprobs))
        start += len(row)
    return torch.cat(differences).abs()


def memory(machine: Machine, report: Report) -> None:
    """The same comparison with prompts in chunks, siblings that share their prompt, and a small cache."""
    page = WorkerConfig().kv_block_tokens
    shape = replace(SMALL, max_positions=8 * page)  # a request must grow over several pages to be in the way of others
    for dtype, (largest, mean) in MISMATCH.items():
        name = str(dtype).removeprefix("torch.")
        full = weights(machine, shape, dtype, seed=1)
        siblings = [each for each in prompts(4, shape.vocab_size, shape.max_positions // 2) for _ in range(4)]
        budgets = [shape.max_positions // 3] * len(siblings)
        found = asyncio.run(_crowded(machine, shape, dtype, page, full, siblings, budgets, report))
        difference = mismatch(machine, shape, dtype, full, siblings, found)
        report.at_most(f"max_{name}", difference.max().item(), largest)
        report.at_most(f"mean_{name}", difference.mean().item(), mean)


async def _crowded(
    machine: Machine,
    shape: ModelShape,
    dtype: torch.dtype,
    page: int,
    full: Mapping[str, Tensor],
    asked: list[list[int]],
    budgets: list[int],
    report: Report,
) -> list[Completion]:
    few = 4 * (shape.max_positions + page) * kv_bytes_per_token(shape, dtype) / 2**30
    async with engine(machine, shape, dtype=dtype, kv_cache_gb=few, prompt_tokens=page + page // 2) as running:
        await running.swap(0, full)
        found = await generate(running, asked, budgets)
        metrics = running.metrics
    report.require(metrics.preemptions > 0, "the cache was never full")
    report.note(preemptions=metrics.preemptions, prefix_tokens_reused=metrics.prefix_tokens_reused)
    return found


def decode_small(machine: Machine, report: Report) -> None:
    _decode(machine, SMALL, report, batches=(1, 64) if machine.is_gpu else (4,), steps=64 if machine.is_gpu else 8)


def decode_600m(machine: Machine, report: Report) -> None:
    machine.require_memory("a model of 0.6 B parameters", gib=60)
    _decode(machine, QWEN3_600M, report, batches=(64, 1, 256), steps=32)


def _decode(machine: Machine, shape: ModelShape, report: Report, *, batches: Sequence[int], steps: int) -> None:
    """Time steps in which all requests decode, and the prompts before; then profile some steps of the first batch."""
    prompt = 256
    ceiling = copy_bytes_per_s(machine)
    decoder = Decoder(machine, shape, room_for=[(batch, prompt + 3 * steps) for batch in batches])
    report.note(kernel=decoder.core.kernel, copy_gb_s=ceiling / 1e9)
    for batch in batches:
        found = decoder.measure(batch, prompt, steps=steps)
        report.note(
            **{
                f"ms_per_step_{batch}": 1e3 * found.step_s,
                f"tokens_per_s_{batch}": found.tokens_per_s,
                f"of_copy_bandwidth_{batch}": found.bytes_per_s / ceiling,
                f"prefill_tokens_per_s_{batch}": found.prefill_tokens_per_s,
            }
        )
    report.note(graphs=float(decoder.core.graphs is not None))
    seen = decoder.profile(batches[0], prompt)
    report.note(kernels_per_step=seen.kernels, device_ms_per_step=1e3 * seen.device_s)


def swap(machine: Machine, report: Report) -> None:
    shape = QWEN3_600M if machine.is_gpu else SMALL
    asyncio.run(_swap(machine, shape, report))


async def _swap(machine: Machine, shape: ModelShape, report: Report) -> None:
    """Swap weights twice under 16 running generations: every token carries its version, and none is lost."""
    dtype, budget = parallel.resolve_dtype(machine.device), 96
    sets = [weights(machine, shape, dtype, seed) for seed in (1, 2, 1)]
    asked = prompts(16, shape.vocab_size, longest=64)
    async with engine(machine, shape, kv_cache_gb=6.0 if machine.is_gpu else 0.5) as running:
        await running.swap(0, sets[0])
        async with asyncio.TaskGroup() as group:
            generating = group.create_task(generate(running, asked, [budget] * len(asked)))
            for number in (1, 2):
                await until_generated(running, number * len(asked) * budget // 3)
                machine.synchronize()
                started = time.perf_counter()
                await running.swap(number, sets[number])
                machine.synchronize()
                report.note(**{f"swap_{number}_ms": 1e3 * (time.perf_counter() - started)})
        found = generating.result()
    report.note(weights_mib=sum(each.numel() * each.element_size() for each in sets[0].values()) / 2**20)
    for each in found:
        spans = each.versions
        report.require(len(each.token_ids) == budget, "a generation ended early")
        report.require([span.version for span in spans] == [0, 1, 2], f"a generation's versions are {spans}")
        report.require([span.start for span in spans] == [0, *(span.stop for span in spans[:-1])], f"gaps between {spans}")
        report.require(spans[-1].stop == budget, f"{spans} do not cover {budget} tokens")
    report.require(len({each.versions for each in found}) <= 2, "the swap came between different steps for different requests")


async def until_generated(running: MegatronEngine, tokens: int) -> None:
    while running.metrics.tokens_generated < tokens:  # noqa: ASYNC110  # the engine has no event for its progress
        await asyncio.sleep(0.001)


CHECKS: Checks = {
    "logprobs": logprobs,
    "kv cache": memory,
    "decode small": decode_small,
    "decode 0.6B": decode_600m,
    "swap": swap,
}
