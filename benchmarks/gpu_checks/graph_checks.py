"""Check of CUDA graphs: they must decode what single launches decode, also beside short prompts, and with whatever weights are
swapped in under them; also if the next one is launched before the tokens of the last are read (asynchronous scheduling).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron.engine.async_scheduling import async_schedule_mode
from async_rl.megatron.experts.grouped import fits_grouped_products
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from gpu_checks.engine_checks import DEFAULTS, MISMATCH, mismatch, prompts, until_generated, weights
from gpu_checks.model_checks import FEW_EXPERTS
from gpu_checks.one_check import Skipped
from gpu_checks.report import SMALL, Checks, Machine, Report
from gpu_checks.token_ids import TokenIds
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.engine_core import EngineCore

Settings = Mapping[str, object]

BATCH, BUDGET = 8, 48
PLAIN, GRAPHS, ASYNC = {"cuda_graphs": "never"}, {"cuda_graphs": "always"}, {"cuda_graphs": "always", "async_scheduling": True}
"""Settings of the worker."""


def graphs(machine: Machine, report: Report) -> None:
    """As many requests as run at once, decoded with and without graphs, and more, which begin beside others; then fewer, and a
    swap in the middle, beside the learner. In float32 on one device the first two differ by little: prompts, by other kernels.
    """
    _graphs(machine, report, SMALL, [*MISMATCH], GRAPHS)


def asynchronous(machine: Machine, report: Report) -> None:
    """The same with asynchronous scheduling, which megatron-core has since 0.19."""
    if async_schedule_mode() is None:
        raise Skipped("this megatron-core has no asynchronous scheduling")
    _graphs(machine, report, SMALL, [*MISMATCH], ASYNC)


def graphs_of_experts(machine: Machine, report: Report) -> None:
    """The same with experts by grouped products, which other devices lack; they decode without graphs."""
    if machine.is_gpu and not fits_grouped_products(FEW_EXPERTS, machine.device, torch.bfloat16):
        report.note(captured="no (this device computes experts one by one)")
        return
    _graphs(machine, report, FEW_EXPERTS, [torch.bfloat16], GRAPHS)


def _graphs(machine: Machine, report: Report, shape: ModelShape, dtypes: Sequence[torch.dtype], settings: Settings) -> None:
    asked, more = prompts(BATCH, shape.vocab_size, longest=150), prompts(2 * BATCH, shape.vocab_size, longest=60)
    for dtype in dtypes:
        largest, mean = MISMATCH[dtype]
        name = str(dtype).removeprefix("torch.")
        old, new = (weights(machine, shape, dtype, seed) for seed in (1, 2))
        for label, given, budgets in ((name, asked, [BUDGET]), (f"{name}_mixed", more, range(2, 30, 3))):
            plain, plain_ms, _ = asyncio.run(_generated(machine, shape, dtype, PLAIN, old, given, budgets))
            replayed, replayed_ms, others = asyncio.run(_generated(machine, shape, dtype, settings, old, given, budgets))
            report.note(**{f"plain_{label}_ms_per_step": plain_ms, f"graphs_{label}_ms_per_step": replayed_ms})
            report.require(others == 0, f"{others} steps were no graphs")
            same = [one.token_ids.tolist() == other.token_ids.tolist() for one, other in zip(plain, replayed, strict=True)]
            report.note(**{f"same_generations_{label}": sum(same) / len(same)})
            report.note(**{f"largest_{label}": _between(plain, replayed, same)})
            report.note(**{f"plain_{label}_mean": mismatch(machine, shape, dtype, old, given, plain).mean().item()})
            difference = mismatch(machine, shape, dtype, old, given, replayed)
            report.at_most(f"graphs_{label}_max", difference.max().item(), largest)
            report.at_most(f"graphs_{label}_mean", difference.mean().item(), mean)

        found = asyncio.run(_swapped(machine, shape, dtype, settings, old, new, asked[:5], report))
        flips = [each.versions[0].stop for each in found]
        under = [mismatch(machine, shape, dtype, full, asked[:5], found).split([BUDGET] * 5) for full in (old, new)]
        before = torch.cat([row[:flip] for row, flip in zip(under[0], flips, strict=True)])
        after = torch.cat([row[flip:] for row, flip in zip(under[1], flips, strict=True)])
        for part, difference in (("before", before), ("after", after)):
            report.at_most(f"{part}_swap_{name}_max", difference.max().item(), largest)
            report.at_most(f"{part}_swap_{name}_mean", difference.mean().item(), mean)


def _between(some: Sequence[Completion], others: Sequence[Completion], same: Sequence[bool]) -> float:
    """The largest difference of log-probabilities among generations with the same tokens."""
    pairs = [(one, other) for one, other, are_same in zip(some, others, same, strict=True) if are_same]
    return max((float(abs(one.logprobs - other.logprobs).max()) for one, other in pairs), default=float("nan"))


def _engine(machine: Machine, shape: ModelShape, dtype: torch.dtype, settings: Settings) -> MegatronEngine:
    # prompts in chunks that graphs have rows for
    given = {"kv_cache_gb": 0.5, "max_running": BATCH, "prompt_tokens_per_step": 128, "kv_on_swap": "recompute", **settings}
    worker, tokenizer = WorkerConfig.model_validate(given), TokenIds(shape.vocab_size)
    return MegatronEngine(shape, tokenizer, worker, DEFAULTS, device=machine.device, seed=7, dtype=dtype)


def _replays(running: MegatronEngine) -> int:
    core = running._core
    return core.graphs.replays if isinstance(core, EngineCore) and core.graphs is not None else 0


async def _all(running: MegatronEngine, asked: Sequence[list[int]], budgets: Iterable[int] = (BUDGET,)) -> list[Completion]:
    generating = (
        running.generate(prompt, GenerationArgs(max_tokens=budget, seed=3))
        for prompt, budget in zip(asked, itertools.cycle(budgets), strict=False)
    )
    return list(await asyncio.gather(*generating))


async def _generated(
    machine: Machine,
    shape: ModelShape,
    dtype: torch.dtype,
    settings: Settings,
    full: Mapping[str, Tensor],
    asked: Sequence[list[int]],
    budgets: Iterable[int],
) -> tuple[list[Completion], float, int]:
    """Return generations, milliseconds of a step once kernels are compiled, and steps that were no graphs."""
    async with _engine(machine, shape, dtype, settings) as running:
        await running.swap(0, full)
        found = await _all(running, asked, budgets)
        started, steps = time.perf_counter(), running.metrics.steps
        others = steps - _replays(running)
        await _all(running, asked, budgets)
        return found, 1e3 * (time.perf_counter() - started) / (running.metrics.steps - steps), others


async def _swapped(
    machine: Machine,
    shape: ModelShape,
    dtype: torch.dtype,
    settings: Settings,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    asked: Sequence[list[int]],
    report: Report,
) -> list[Completion]:
    started = time.perf_counter()
    async with _engine(machine, shape, dtype, settings) as running:
        report.note(start_s=time.perf_counter() - started)
        await running.swap(0, old)
        async with asyncio.TaskGroup() as group:
            generating = group.create_task(_all(running, asked))
            await until_generated(running, len(asked) * BUDGET // 3)
            await running.swap(1, new)
        found = generating.result()
    spans = [[span.version for span in each.versions] for each in found]
    report.require(all(each == [0, 1] for each in spans), f"generations have versions {spans}")
    return found


CHECKS: Checks = {"graphs": graphs, "graphs async": asynchronous, "graphs experts": graphs_of_experts}
