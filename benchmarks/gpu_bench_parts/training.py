"""Training on packed rows: the share of the GPU's peak, by size and recomputation, and what uneven lengths cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_checks.counts import data_sheet_flops, training_flops
from gpu_checks.learner_checks import REINFORCE
from gpu_checks.report import QWEN3_600M, SMALL, Check, Checks, Machine, Report
from learner_parts.rollouts import groups_of, lognormal_lengths

from async_rl.config import Config
from async_rl.models.shape import ModelShape
from async_rl.plan.memory import memory_plan, total
from gpu_bench_parts.goals import TRAINED
from gpu_bench_parts.models import QWEN3
from learner.batches.batch import pack_batch
from learner.ranks.rank_group import RankGroup

ROW = 32768
"""Tokens of a packed row."""
BESIDE_GIB = 3.0
"""GPU memory that a measurement needs beside what is planned: CUDA's context, and gaps between allocations."""


def mfu(size: str, recompute: str, machine: Machine, report: Report) -> None:
    row = _row(machine)
    shape = replace(QWEN3[size] if machine.is_gpu else SMALL, max_positions=row)
    planned = planned_gib(shape, row, recompute)
    if machine.is_gpu:
        machine.require_memory(f"training {size} with recompute {recompute}", gib=planned + BESIDE_GIB)
    rank_group = learner_of(shape, row, recompute)
    report.note(planned_gib=planned)
    _train(machine, rank_group, shape, report, [row // 8] * 16, row)
    rank_group.stop()


def lengths(machine: Machine, report: Report) -> None:
    """Rows of lognormal lengths beside rows of one long sequence, in one process: tokens trained a second."""
    row = _row(machine)
    shape = replace(QWEN3_600M if machine.is_gpu else SMALL, max_positions=row)
    uneven = lognormal_lengths(64, median=row // 8, longest=row, seed=5)
    equal = [row] * (4 * max(1, round(sum(uneven) / row / 4)))  # groups of four
    rank_group = learner_of(shape, row, "selective")
    of_equal = _train(machine, rank_group, shape, report, equal, row, "equal_")
    report.note(uneven_over_equal=_train(machine, rank_group, shape, report, uneven, row, "uneven_") / of_equal)
    rank_group.stop()


def _row(machine: Machine) -> int:
    return ROW if machine.is_gpu else 256


def learner_of(shape: ModelShape, row: int, recompute: str) -> RankGroup:
    return RankGroup(_config(row, recompute), REINFORCE, shape)


def planned_gib(shape: ModelShape, row: int, recompute: str) -> float:
    """Return the plan of a learner that pushes nothing."""
    parts = memory_plan(_config(row, recompute), shape).learner
    return total(part for part in parts if part.name != "packed weights") / 2**30


def _config(row: int, recompute: str) -> Config:
    given: dict[str, Any] = {
        "model": {"size": {"hidden": 128, "layers": 4, "heads": 4}},  # replaced by the given shape
        "environments": [{"type": "even_digits"}],
        "batch": {"bin_tokens": row},
        "learner": {"steps": 100, "recompute": recompute, "optimizer": {"learning_rate": 1e-5}},
    }
    return Config.model_validate(given)


def _train(
    machine: Machine,
    rank_group: RankGroup,
    shape: ModelShape,
    report: Report,
    lengths: Sequence[int],
    row: int,
    prefix: str = "",
) -> float:
    """Note the figures of a step, the median of four, and return the trained tokens a second."""
    groups = groups_of([*lengths], group_size=4, vocab_size=shape.vocab_size, seed=3)
    packed = pack_batch(groups, objective=REINFORCE, capacity=row)
    if machine.is_gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
    spent: list[float] = []
    for _ in range(5 if machine.is_gpu else 2):
        started = time.perf_counter()
        result = rank_group.step(packed)
        machine.synchronize()
        spent.append(time.perf_counter() - started)
        report.require(not result.skipped, "a step was not finite")
    step_s = sorted(spent[1:])[len(spent[1:]) // 2]
    flops_per_s, tokens_per_s = training_flops(shape, lengths) / step_s, sum(lengths) / step_s
    report.note(
        **{f"{prefix}step_ms": 1e3 * step_s, f"{prefix}tokens_per_s": tokens_per_s, f"{prefix}tflops": flops_per_s / 1e12}
    )
    if machine.is_gpu:
        report.note(**{f"{prefix}peak_gib": torch.cuda.max_memory_allocated(machine.device) / 2**30})
    if peak := data_sheet_flops(machine.device):
        report.note(**{f"{prefix}mfu": flops_per_s / peak})
    return tokens_per_s


def _of(size: str, recompute: str) -> Check:
    return lambda machine, report: mfu(size, recompute, machine, report)


CHECKS: Checks = {
    "lengths": lengths,
    **{f"train {size} {recompute}": _of(size, recompute) for size, recompute in TRAINED},
}
