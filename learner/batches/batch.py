"""Pack groups into a batch: which rollouts are trained, the denominators of the loss, and the rows of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Generic, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from async_rl.config.learner import TooLong
from async_rl.types import TakenGroup
from learner.advantages.rollouts import RolloutCredit, assign_credit
from learner.batches.packed_rows import PackedRow, TrainedSample, fill, from_buffers, to_buffers
from learner.batches.too_long import num_too_long, within
from learner.losses.aggregation import StepCounts
from learner.objective import Objective
from learner.packing.cost import TYPICAL, Cost
from learner.packing.planner import Bins, plan

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMinibatch(Generic[RowT]):
    """One data-parallel rank's rows of one optimizer update."""

    rows: Sequence[RowT]
    counts: StepCounts
    """Counts of the whole update, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """One optimizer update: for every data-parallel rank the same number of packed rows."""

    shards: tuple[tuple[PackedRow, ...], ...]
    counts: StepCounts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """A packed step: the updates that its groups are divided into."""

    minibatches: tuple[Minibatch, ...]
    metrics: Mapping[str, float]
    """`batch/...` metrics: trained tokens, fill and balance of the rows."""
    magnitudes: tuple[float, ...]
    """Mean |advantage| of each group's rollouts."""
    advantages: tuple[tuple[float | None, ...], ...]
    """One for each rollout of each group, None where it is not trained. Empty if a rollout has no single one."""

    @property
    def num_shards(self) -> int:
        return len(self.minibatches[0].shards)


def pack_batch(
    groups: Sequence[TakenGroup],
    *,
    objective: Objective,
    capacity: int,
    longest: int | None = None,
    too_long: TooLong = "truncate",
    num_shards: int = 1,
    minibatches: int = 1,
    multiple: int = 1,
    bins_multiple: int = 1,
    cost: Cost = TYPICAL,
) -> PackedBatch:
    """Pack the groups of a step. `capacity` is the size of a row in tokens; `multiple`, `bins_multiple`, `cost`: see `plan`.

    Samples of more than `longest` tokens (model.max_sequence) are treated as `too_long` says and counted in `batch/too_long`.
    """
    num_over = num_too_long(groups, longest) if longest is not None else 0
    if longest is not None and num_over:
        groups = within(groups, longest, too_long)
    rollouts = [(place, rollout) for place, taken in enumerate(groups) for rollout in taken.group.rollouts]
    credit = assign_credit(groups, objective)
    sources = [
        TrainedSample(
            sample=sample,
            trained=trained,
            advantage=float(credit.advantages[index]),
            reward=float(credit.rewards[index]),
            version=groups[place].version_at_take,
            group=place,
        )
        for index, (place, rollout) in enumerate(rollouts)
        if credit.is_trained[index]
        for sample in rollout.samples
        if (trained := int(np.count_nonzero(sample.loss_mask[1:])))
    ]

    def schedule(lengths: Sequence[int]) -> list[Bins]:
        planned = plan(lengths, capacity, num_shards, multiple=multiple, bins_multiple=bins_multiple, cost=cost)
        # every rank runs at least one backward pass: the gradient reduction is collective
        return [bins if bins else [[] for _ in range(bins_multiple)] for bins in planned]

    # groups are not split between updates: some losses average over the tokens of a group
    updates = min(minibatches, max(len(groups), 1))
    portions = [[each for each in sources if each.group * updates // len(groups) == update] for update in range(updates)]
    made = tuple(
        Minibatch(shards=fill(portion, schedule([len(each.sample) for each in portion])), counts=_count(portion))
        for portion in portions
    )
    owners = np.array([place for place, _ in rollouts], np.int64)
    magnitudes = tuple(float(np.abs(credit.advantages[owners == place]).mean()) for place in range(len(groups)))
    metrics = {**_describe(credit.advantages, made, capacity, cost), "batch/too_long": float(num_over)}
    return PackedBatch(
        minibatches=made, metrics=metrics, magnitudes=magnitudes, advantages=_per_group(groups, credit, objective)
    )


def _per_group(
    groups: Sequence[TakenGroup], credit: RolloutCredit, objective: Objective
) -> tuple[tuple[float | None, ...], ...]:
    if not objective.has_rollout_advantages:
        return ((),) * len(groups)
    advantages = iter(np.where(credit.is_trained, credit.advantages, np.nan).tolist())
    each = ([next(advantages) for _ in taken.group.rollouts] for taken in groups)
    return tuple(tuple(None if isnan(advantage) else advantage for advantage in group) for group in each)


def _count(sources: Sequence[TrainedSample]) -> StepCounts:
    groups, owner = np.unique(np.array([each.group for each in sources], np.int64), return_inverse=True)
    group_tokens = np.zeros(len(groups), np.int64)
    np.add.at(group_tokens, owner, [each.trained for each in sources])
    return StepCounts(
        tokens=int(group_tokens.sum()),
        sequences=len(sources),
        groups=torch.from_numpy(groups),
        group_tokens=torch.from_numpy(group_tokens),
    )


# -- metrics ------------------------------------------------------------------------------------------------------------


def _describe(advantages: npt.NDArray[np.float64], made: Sequence[Minibatch], capacity: int, cost: Cost) -> dict[str, float]:
    tokens = np.concatenate([_of_bins(each, lambda bin_: len(bin_.token_ids)) for each in made], axis=1)
    costs = np.concatenate([_of_bins(each, lambda bin_: cost.of(np.diff(bin_.cu_seqlens)).sum()) for each in made], axis=1)
    per_shard = tokens.sum(axis=1)
    return {
        "batch/advantage_abs": float(np.abs(advantages).mean()) if len(advantages) else 0.0,
        "batch/no_signal_frac": float((advantages == 0).mean()) if len(advantages) else 0.0,
        "batch/sequences": float(sum(each.counts.sequences for each in made)),
        "batch/trained_tokens": float(sum(each.counts.tokens for each in made)),
        "batch/tokens": float(tokens.sum()),
        "batch/bins": float(tokens.size),
        "batch/fill": float(tokens.sum() / np.maximum(tokens, capacity).sum()),
        "batch/oversize": float((tokens > capacity).sum()),
        "batch/imbalance": float(per_shard.max() / max(per_shard.mean(), 1.0)),
        "batch/lock_step": float(costs.max(axis=0).sum() / max(costs.mean(axis=0).sum(), 1.0)),
    }


def _of_bins(minibatch: Minibatch, measure: Callable[[PackedRow], float]) -> npt.NDArray[np.float64]:
    """[shards, bins]"""
    return np.array([[measure(each) for each in bins] for bins in minibatch.shards], np.float64)


# -- one shard as bytes, to be broadcast to its ranks -----------------------------------------------------------------------


def shard_to_bytes(batch: PackedBatch, shard: int) -> bytes:
    """Serialise one shard: the counts and rows of every update."""
    packed = msgpack.packb(
        [
            {
                "rows": [to_buffers(row) for row in minibatch.shards[shard]],
                "tokens": minibatch.counts.tokens,
                "sequences": minibatch.counts.sequences,
                "groups": minibatch.counts.groups.tolist(),
                "group_tokens": minibatch.counts.group_tokens.tolist(),
            }
            for minibatch in batch.minibatches
        ]
    )
    assert packed is not None
    return packed


def shard_from_bytes(payload: bytes) -> tuple[RankMinibatch[PackedRow], ...]:
    return tuple(
        RankMinibatch(
            rows=[from_buffers(buffers) for buffers in update["rows"]],
            counts=StepCounts(
                tokens=update["tokens"],
                sequences=update["sequences"],
                groups=torch.tensor(update["groups"], dtype=torch.int64),
                group_tokens=torch.tensor(update["group_tokens"], dtype=torch.int64),
            ),
        )
        for update in msgpack.unpackb(payload)
    )
