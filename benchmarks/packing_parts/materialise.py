"""Build the packed columns of a step from rollouts."""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np

from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from learner.batches.batch import PackedBatch, pack_batch
from learner.batches.packed_rows import PackedRow
from learner.objective import Objective
from packing_parts.measure import CAPACITY, Lengths

GROUP_SIZE = 8


def groups_of(lengths: Lengths, seed: int) -> list[TakenGroup]:
    """A quarter of every row is the prompt; the answer was sampled by two versions."""
    rng = np.random.default_rng(seed)
    rollouts = [_rollout(length, rng) for length in lengths.tolist()]
    return [_group(tuple(rollouts[start : start + GROUP_SIZE])) for start in range(0, len(rollouts), GROUP_SIZE)]


def _rollout(length: int, rng: np.random.Generator) -> Rollout:
    mask = np.ones(length, np.uint8)
    prompt, swap = length // 4, length // 2
    mask[:prompt] = 0
    row = Sample(
        token_ids=rng.integers(0, 1000, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length, dtype=np.float32), np.float32(0)),
        versions=(VersionSpan(version=1, start=prompt, stop=swap), VersionSpan(version=2, start=swap, stop=length)),
    )
    return Rollout(samples=(row,), reward=float(rng.random()), status=Status.OK)


def _group(rollouts: tuple[Rollout, ...]) -> TakenGroup:
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
    return TakenGroup(group=group, version_at_commit=2, version_at_take=3)


def packed_ms(groups: list[TakenGroup]) -> tuple[float, PackedBatch]:
    objective = Objective()
    started = time.process_time()
    batch = pack_batch(groups, objective=objective, capacity=CAPACITY)
    return 1e3 * (time.process_time() - started), batch


def copied_ms(batch: PackedBatch) -> float:
    """Copy the same bytes, without any packing."""
    columns = [
        np.concatenate([getattr(each, field.name) for shard in batch.minibatches[0].shards for each in shard])
        for field in fields(PackedRow)
    ]
    started = time.process_time()
    copies = [column.copy() for column in columns]
    ms = 1e3 * (time.process_time() - started)
    assert len(copies) == len(columns)
    return ms
