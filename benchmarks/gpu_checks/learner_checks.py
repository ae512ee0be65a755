"""Checks of the learner: whether it learns, how fast, and whether it resumes exactly."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from async_rl.config import Config
from async_rl.megatron.parameters.full_parameters import table
from async_rl.models.shape import ModelShape
from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from learner.batches.batch import PackedBatch, pack_batch
from learner.checkpoints import training_state
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup

REINFORCE = Objective.model_validate(
    {"advantages": {"scale": "none"}, "policy_loss": {"surrogate": "reinforce", "aggregation": "sequence_mean_token_mean"}}
)
DENSE_BF16_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Peak FLOP/s by a part of the GPU's name, from the data sheets (SXM, without sparsity)."""


def config(learning_rate: float) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 128, "layers": 4, "heads": 4}},  # replaced by the given shape
            "environments": [{"type": "even_digits"}],
            "learner": {"steps": 100, "optimizer": {"learning_rate": learning_rate}},
        }
    )


def batch(shape: ModelShape, *, tokens: int, longest: int) -> PackedBatch:
    """Return groups of random rollouts with about `tokens` tokens in total, packed into rows of 8192."""
    rng, groups, made = np.random.default_rng(3), [], 0
    while made < tokens:
        rollouts = tuple(_rollout(rng, shape.vocab_size, int(rng.integers(longest // 4, longest))) for _ in range(4))
        made += sum(len(rollout.samples[0]) for rollout in rollouts)
        group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
        groups.append(TakenGroup(group=group, version_at_commit=0, version_at_take=0))
    return pack_batch(groups, objective=REINFORCE, capacity=8192)


def _rollout(rng: np.random.Generator, vocab_size: int, length: int) -> Rollout:
    mask = np.ones(length, np.uint8)
    mask[: length // 4] = 0
    row = Sample(
        token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -math.log(vocab_size), 0).astype(np.float32),
        versions=(VersionSpan(version=0, start=length // 4, stop=length),),
    )
    return Rollout(samples=(row,), reward=float(rng.random()), status=Status.OK)


def learn_small(machine: Machine, report: Report) -> None:
    _learn(machine, SMALL, report, tokens=65536 if machine.is_gpu else 2048, longest=512, learning_rate=1e-3)


def learn_600m(machine: Machine, report: Report) -> None:
    machine.require_memory("training 0.6 B parameters", gib=60)
    _learn(machine, QWEN3_600M, report, tokens=32768, longest=4096, learning_rate=1e-5)


def _learn(
    machine: Machine, shape: ModelShape, report: Report, *, tokens: int, longest: int, learning_rate: float, steps: int = 5
) -> None:
    """Train on the same batch repeatedly: its loss must fall."""
    fixed = batch(shape, tokens=tokens, longest=longest)
    rank_group = RankGroup(config(learning_rate), REINFORCE, shape)
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
    trained = sum(len(each.token_ids) for each in fixed.minibatches[0].shards[0])
    report.note(
        loss_first=losses[0],
        loss_last=losses[-1],
        step_ms=1e3 * step_s,
        tokens_per_s=trained / step_s,
        teraflops=_flops(shape, fixed) / step_s / 1e12,
    )
    if machine.is_gpu:
        report.note(peak_gib=torch.cuda.max_memory_allocated(machine.device) / 2**30)
        name = torch.cuda.get_device_name(machine.device)
        if peak := next((each for part, each in DENSE_BF16_FLOPS.items() if part in name), None):
            report.note(mfu=_flops(shape, fixed) / step_s / peak)
    rank_group.stop()
    report.require(losses[-1] < losses[0], f"the loss did not fall: {losses}")


def _flops(shape: ModelShape, of: PackedBatch) -> float:
    """FLOPs of forward and backward: 6 per weight and token; causal attention: 6 x width x length per layer and token."""
    matrices = sum(math.prod(row.shape) for row in table(shape) if len(row.shape) == 2)
    if not shape.tied_embeddings:
        matrices -= shape.vocab_size * shape.hidden  # an embedding lookup is no matrix product
    lengths = np.concatenate([np.diff(each.cu_seqlens) for each in of.minibatches[0].shards[0]]).astype(np.float64)
    attention = 6 * shape.layers * shape.heads * shape.head_dim * float((lengths**2).sum())
    return 6 * matrices * float(lengths.sum()) + attention


def checkpoint(machine: Machine, report: Report) -> None:
    """A learner that loads a checkpoint holds the same bits, and its next step is the same."""
    fixed = batch(SMALL, tokens=2048 if machine.is_gpu else 512, longest=256)
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
