"""Checks of the learner: whether it learns, how fast, and whether it resumes exactly."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from learner_parts.rollouts import groups_of

from async_rl.config import Config
from async_rl.models.shape import ModelShape
from gpu_checks.ceilings import product_flops_per_s
from gpu_checks.counts import data_sheet_flops, training_flops
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Figure, Machine, Report
from learner.batches.batch import PackedBatch, pack_batch
from learner.checkpoints import training_state
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup

REINFORCE = Objective.model_validate(
    {"advantages": {"scale": "none"}, "policy_loss": {"surrogate": "reinforce", "aggregation": "sequence_mean_token_mean"}}
)


def config(learning_rate: float) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 128, "layers": 4, "heads": 4}},  # replaced by the given shape
            "environments": [{"type": "even_digits"}],
            "learner": {"steps": 100, "optimizer": {"learning_rate": learning_rate}},
        }
    )


ROW = 8192
"""Tokens of a packed row."""


def batch(shape: ModelShape, lengths: Sequence[int]) -> PackedBatch:
    """Return random rollouts of these lengths in groups of four, packed into rows."""
    groups = groups_of([*lengths], group_size=4, vocab_size=shape.vocab_size, seed=3)
    return pack_batch(groups, objective=REINFORCE, capacity=ROW)


def learn_small(machine: Machine, report: Report) -> None:
    lengths = [300, 500, 128, 400] * (48 if machine.is_gpu else 2)
    _learn(machine, SMALL, report, {"": lengths}, learning_rate=1e-3)


def learn_600m(machine: Machine, report: Report) -> None:
    """Rows of four sequences and of 32: what a row costs must depend on its tokens alone."""
    machine.require_memory("training 0.6 B parameters", gib=60)
    report.note(product_tflops=product_flops_per_s(machine) / 1e12)
    compositions = {f"_of_{count}": [ROW // count] * (4 * count) for count in (4, 32)}
    _learn(machine, QWEN3_600M, report, compositions, learning_rate=1e-5)


def _learn(
    machine: Machine,
    shape: ModelShape,
    report: Report,
    compositions: Mapping[str, Sequence[int]],
    *,
    learning_rate: float,
    steps: int = 5,
) -> None:
    """Train on each batch repeatedly: its loss must fall."""
    rank_group = RankGroup(config(learning_rate), REINFORCE, shape)
    for name, lengths in compositions.items():
        fixed = batch(shape, lengths)
        if machine.is_gpu:
            torch.cuda.reset_peak_memory_stats(machine.device)
        losses: list[float] = []
        spent: list[float] = []
        for _ in range(steps + 1):
            started = time.perf_counter()
            result = rank_group.step(fixed)
            machine.synchronize()
            spent.append(time.perf_counter() - started)
            losses.append(result.loss)
            report.require(not result.skipped, f"a step was not finite: {losses}")
        step_s = sorted(spent[1:])[steps // 2]
        flops_per_s = training_flops(shape, lengths) / step_s
        figures: dict[str, Figure] = {
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "first_step_ms": 1e3 * spent[0],
            "step_ms": 1e3 * step_s,
            "tokens_per_s": sum(lengths) / step_s,
            "tflops": flops_per_s / 1e12,
        }
        if machine.is_gpu:
            figures["peak_gib"] = torch.cuda.max_memory_allocated(machine.device) / 2**30
        if peak := data_sheet_flops(machine.device):
            figures["mfu"] = flops_per_s / peak
        report.note(**{f"{figure}{name}": value for figure, value in figures.items()})
        report.require(losses[-1] < losses[0], f"the loss did not fall: {losses}")
    rank_group.stop()


def checkpoint(machine: Machine, report: Report) -> None:
    """A learner that loads a checkpoint holds the same bits, and its next step is the same."""
    fixed = batch(SMALL, [64, 128, 256, 64] * (4 if machine.is_gpu else 1))
    with tempfile.TemporaryDirectory() as folder:
        rank_group = RankGroup(config(1e-3), REINFORCE, SMALL)
        for _ in range(2):
            rank_group.step(fixed)
        saved = {name: tensor.clone() for name, tensor in training_state.capture(rank_group.model).items()}
        started = time.perf_counter()
        written = rank_group.save(Path(folder), step=2, extra={}, keep=1)
        report.note(stall_ms=1e3 * (time.perf_counter() - started))
        report.note(save_ms=1e3 * written.result().seconds)
        following = rank_group.step(fixed)

        successor = RankGroup(config(1e-3), REINFORCE, SMALL)
        started = time.perf_counter()
        successor.load(Path(folder))
        report.note(load_ms=1e3 * (time.perf_counter() - started), tensors=len(saved))
        loaded = training_state.capture(successor.model)
        differing = [name for name, tensor in saved.items() if name not in loaded or not torch.equal(tensor, loaded[name])]
        report.require(saved.keys() == loaded.keys() and not differing, f"not what was saved: {sorted(differing)[:5]}")
        # backward passes on a GPU sum in varying order, so only what precedes the update must be exact
        report.at_most("next_loss_difference", abs(successor.step(fixed).loss - following.loss), 1e-6)
        successor.stop()


CHECKS: Checks = {"learn small": learn_small, "learn 0.6B": learn_600m, "checkpoint": checkpoint}
