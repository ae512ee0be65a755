"""Checks of the learner: whether it learns, how fast, and whether it resumes and repeats exactly."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from learner_parts.rollouts import groups_of
from torch import Tensor

from async_rl.config import Config
from async_rl.megatron.model import forward_packed, pack
from async_rl.models.shape import Experts, ModelShape
from gpu_checks.ceilings import product_flops_per_s
from gpu_checks.counts import data_sheet_flops, training_flops
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Figure, Machine, Report
from learner.batches.batch import PackedBatch, pack_batch
from learner.checkpoints import training_state
from learner.model import TrainingModel
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup

REINFORCE = Objective.model_validate(
    {"advantages": {"scale": "none"}, "policy_loss": {"surrogate": "reinforce", "aggregation": "sequence_mean_token_mean"}}
)


WITH_EXPERTS = replace(SMALL, experts=Experts(number=8, per_token=2, ffn=64, layers=(1, 3)))


def config(learning_rate: float, *, deterministic: bool = False, offload: bool = False) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 128, "layers": 4, "heads": 4}},  # replaced by the given shape
            "environments": [{"type": "even_digits"}],
            "learner": {
                "steps": 100,
                "optimizer": {"learning_rate": learning_rate, "offload": offload},
                "deterministic": deterministic,
            },
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
    """A learner that loads a checkpoint holds the same bits, and its next step is the same. Its moments are on the host, where
    an update may still be bringing them.
    """
    fixed = batch(SMALL, [64, 128, 256, 64] * (4 if machine.is_gpu else 1))
    settings = config(1e-3, offload=machine.is_gpu)
    with tempfile.TemporaryDirectory() as folder:
        rank_group = RankGroup(settings, REINFORCE, SMALL)
        for _ in range(2):
            rank_group.step(fixed)
        started = time.perf_counter()
        written = rank_group.save(Path(folder), step=2, extra={}, keep=1)
        report.note(stall_ms=1e3 * (time.perf_counter() - started))
        machine.synchronize()
        saved = {name: tensor.clone() for name, tensor in training_state.capture(rank_group.model).items()}
        report.note(save_ms=1e3 * written.result().seconds)
        following = rank_group.step(fixed)

        successor = RankGroup(settings, REINFORCE, SMALL)
        started = time.perf_counter()
        successor.load(Path(folder))
        report.note(load_ms=1e3 * (time.perf_counter() - started), tensors=len(saved))
        machine.synchronize()
        loaded = training_state.capture(successor.model)
        differing = [name for name, tensor in saved.items() if name not in loaded or not torch.equal(tensor, loaded[name])]
        report.require(saved.keys() == loaded.keys() and not differing, f"not what was saved: {sorted(differing)[:5]}")
        # backward passes on a GPU sum in varying order, so only what precedes the update must be exact
        report.at_most("next_loss_difference", abs(successor.step(fixed).loss - following.loss), 1e-6)
        successor.stop()


def repeats(machine: Machine, report: Report) -> None:
    """Two learners with experts and `learner.deterministic` that train on the same batches have the same bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as runs set it then
    fixed = batch(WITH_EXPERTS, [64, 128, 256, 64] * (4 if machine.is_gpu else 1))
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        rank_group = RankGroup(config(1e-3, deterministic=True), REINFORCE, WITH_EXPERTS)
        for _ in range(2):
            report.require(not rank_group.step(fixed).skipped, "a step was not finite")
        found.append({name: tensor.clone() for name, tensor in training_state.capture(rank_group.model).items()})
        rank_group.stop()
    one, other = found
    differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    report.require(not differing, f"not the same twice: {sorted(differing)[:5]}")
    report.note(tensors=len(one))


def weight_gradients(machine: Machine, report: Report) -> None:
    """Gradients of matrices that are added to float32 buffers in the product, beside those of products that are rounded first.

    Rounding to bfloat16 changes no element of a product by more than 2^-8 of it, so no matrix by more than that of its norm. As
    much again is allowed because a GPU may add up parts of that product in bfloat16, and twice what repetitions differ by.
    """
    rank_group = RankGroup(config(1e-3), REINFORCE, SMALL)
    model = rank_group.model
    layers: list[Any] = [each for each in model.chunks.modules() if getattr(each, "gradient_accumulation_fusion", False)]
    report.require(len(layers) == 4 * SMALL.layers, f"{len(layers)} matrices add to their buffers")
    added = _of_matrices(machine, model, layers)
    for each in layers:
        each.gradient_accumulation_fusion = False
    rounded, again = (_of_matrices(machine, model, layers) for _ in range(2))
    rank_group.stop()
    repetition = max(map(_distance, again, rounded))
    report.note(matrices=len(layers), repetition=repetition)
    of_a_product = 2**-8 if model.dtype is torch.bfloat16 else 1e-5  # float32: sums in another order
    report.at_most("distance", max(map(_distance, added, rounded)), 2 * of_a_product + 2 * repetition)


def _of_matrices(machine: Machine, model: TrainingModel, layers: Sequence[Any]) -> list[Tensor]:
    """Their gradients after the same row twice: two products that do not cancel."""
    random = torch.Generator().manual_seed(5)
    row = [torch.randint(0, SMALL.vocab_size, (length,), generator=random).to(machine.device) for length in (300, 1, 211)]
    direction = torch.randn(512, SMALL.vocab_size, generator=random).to(machine.device)
    model.zero_gradients()
    for _ in range(2):
        (forward_packed(model.chunks[0], *pack(row)).logits() * direction).sum().backward()
    return [each.weight.main_grad.clone() for each in layers]


def _distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


CHECKS: Checks = {
    "learn small": learn_small,
    "learn 0.6B": learn_600m,
    "checkpoint": checkpoint,
    "repeats": repeats,
    "weight gradients": weight_gradients,
}
