"""Groups to packed bins of numpy arrays, everything aligned to the position that predicts.

sample      x0  x1  x2  x3          loss_mask  0 0 1 1
token_ids   x0  x1  x2  x3          the model's input
targets     x1  x2  x3  ·           what each position predicts
mask         0   1   1   0          loss_mask, behaviour and advantages move with the targets;
                                    the last position predicts nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from async_rl.types import Float32s, Int32s, Mask, Sample, Status, TakenGroup
from learner.advantages import group_advantages
from learner.losses import StepCounts
from learner.objective import Objective
from learner.packing import plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bin:
    """One packed micro-batch row of T tokens in S sequences. An empty bin has T = S = 0."""

    token_ids: Int32s
    positions: Int32s
    """Counted from 0 in every sequence."""
    targets: Int32s
    mask: Mask
    behaviour: Float32s
    advantages: Float32s
    rewards: Float32s
    """A rollout's reward, where the last trained token of each of its samples is predicted; 0 elsewhere."""
    ages: Int32s
    """Version being trained minus the version that sampled the target; 0 where nothing is trained."""
    cu_seqlens: Int32s
    group_ids: Int32s
    """One per sequence: the group's place in the batch."""


_DTYPES = {
    "token_ids": np.dtype("<i4"),
    "positions": np.dtype("<i4"),
    "targets": np.dtype("<i4"),
    "mask": np.dtype("u1"),
    "behaviour": np.dtype("<f4"),
    "advantages": np.dtype("<f4"),
    "rewards": np.dtype("<f4"),
    "ages": np.dtype("<i4"),
    "cu_seqlens": np.dtype("<i4"),
    "group_ids": np.dtype("<i4"),
}
assert set(_DTYPES) == {each.name for each in fields(Bin)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """What one data-parallel rank trains in one optimizer update."""

    bins: tuple[Bin, ...]
    counts: StepCounts
    """Of the whole update, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """One optimizer update: a list of bins for every data-parallel rank, all of the same length."""

    shards: tuple[tuple[Bin, ...], ...]
    counts: StepCounts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One step, ready to run: the updates that its groups are divided into."""

    minibatches: tuple[Minibatch, ...]
    metrics: Mapping[str, float]
    """How much there is to learn from, and how well the bins are filled."""
    magnitudes: tuple[float, ...]
    """Mean |advantage| of each group's rollouts."""

    @property
    def num_shards(self) -> int:
        return len(self.minibatches[0].shards)


def pack_batch(
    groups: Sequence[TakenGroup], *, objective: Objective, capacity: int, num_shards: int = 1, minibatches: int = 1
) -> PackedBatch:
    """Failed rollouts enter neither baseline nor loss; masked ones only the baseline."""
    rollouts = [(place, rollout) for place, taken in enumerate(groups) for rollout in taken.group.rollouts]
    advantages = group_advantages(
        [rollout.reward for _, rollout in rollouts],
        [place for place, _ in rollouts],
        valid=[rollout.status is not Status.FAILED for _, rollout in rollouts],
        **objective.advantages.model_dump(),
    )
    rows = [
        _Row(
            sample=sample,
            advantage=float(advantage),
            reward=rollout.reward,
            version=groups[place].version_at_take,
            group=place,
        )
        for (place, rollout), advantage in zip(rollouts, advantages, strict=True)
        if rollout.status in (Status.OK, Status.TRUNCATED)
        for sample in rollout.samples
        if sample.loss_mask[1:].any()
    ]
    # whole groups stay together: some losses average over the tokens of a group
    updates = min(minibatches, max(len(groups), 1))
    portions = [[row for row in rows if row.group * updates // len(groups) == update] for update in range(updates)]
    made = tuple(_minibatch(portion, capacity, num_shards) for portion in portions)
    owners = np.array([place for place, _ in rollouts], np.int64)
    magnitudes = tuple(float(np.abs(advantages[owners == place]).mean()) for place in range(len(groups)))
    return PackedBatch(minibatches=made, metrics=_describe(advantages, made, capacity), magnitudes=magnitudes)


def _minibatch(rows: Sequence[_Row], capacity: int, num_shards: int) -> Minibatch:
    planned = plan([len(row.sample) for row in rows], capacity, num_shards)
    # every rank runs at least one backward pass, because the others wait for it there
    shards = tuple(tuple(_fill([rows[index] for index in members]) for members in bins or [[]]) for bins in planned)
    return Minibatch(shards=shards, counts=_count(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    sample: Sample
    advantage: float
    reward: float
    version: int
    """Of the weights that it trains."""
    group: int


def _fill(rows: Sequence[_Row]) -> Bin:
    lengths = [len(row.sample) for row in rows]
    total = sum(lengths)
    made = Bin(
        token_ids=np.zeros(total, np.int32),
        positions=np.zeros(total, np.int32),
        targets=np.zeros(total, np.int32),
        mask=np.zeros(total, np.uint8),
        behaviour=np.zeros(total, np.float32),
        advantages=np.zeros(total, np.float32),
        rewards=np.zeros(total, np.float32),
        ages=np.zeros(total, np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        group_ids=np.array([row.group for row in rows], np.int32),
    )
    for row, start, stop in zip(rows, made.cu_seqlens[:-1].tolist(), made.cu_seqlens[1:].tolist(), strict=True):
        sample, predicting = row.sample, slice(start, stop - 1)
        made.token_ids[start:stop] = sample.token_ids
        made.positions[start:stop] = np.arange(stop - start)
        made.targets[predicting] = sample.token_ids[1:]
        made.mask[predicting] = sample.loss_mask[1:]
        made.behaviour[predicting] = np.where(sample.loss_mask[1:], sample.logprobs[1:], 0)
        made.advantages[predicting] = sample.loss_mask[1:] * np.float32(row.advantage)
        made.rewards[start + sample.loss_mask.nonzero()[0][-1] - 1] = row.reward
        for span in sample.versions:  # a token at the row's very beginning is predicted by nothing
            made.ages[start + max(span.start - 1, 0) : start + span.stop - 1] = row.version - span.version
    return made


def _count(rows: Sequence[_Row]) -> StepCounts:
    trained = np.array([np.count_nonzero(row.sample.loss_mask[1:]) for row in rows], dtype=np.int64)
    groups, owner = np.unique(np.array([row.group for row in rows], dtype=np.int64), return_inverse=True)
    group_tokens = np.zeros(len(groups), dtype=np.int64)
    np.add.at(group_tokens, owner, trained)
    return StepCounts(
        tokens=int(trained.sum()),
        sequences=len(rows),
        groups=torch.from_numpy(groups),
        group_tokens=torch.from_numpy(group_tokens),
    )


# -- metrics ------------------------------------------------------------------------------------------------------------


def _describe(advantages: npt.NDArray[np.float64], made: Sequence[Minibatch], capacity: int) -> dict[str, float]:
    tokens = [np.array([[len(each.token_ids) for each in bins] for bins in minibatch.shards]) for minibatch in made]
    num_bins, num_tokens = sum(each.size for each in tokens), sum(each.sum() for each in tokens)
    per_shard = sum(each.sum(axis=1) for each in tokens)
    return {
        "batch/advantage_abs": float(np.abs(advantages).mean()) if len(advantages) else 0.0,
        "batch/no_signal_frac": float((advantages == 0).mean()) if len(advantages) else 0.0,
        "batch/sequences": float(sum(each.counts.sequences for each in made)),
        "batch/trained_tokens": float(sum(each.counts.tokens for each in made)),
        "batch/tokens": float(num_tokens),
        "batch/bins": float(num_bins),
        "batch/fill": float(num_tokens / (num_bins * capacity)),
        "batch/imbalance": float(np.max(per_shard) / max(np.mean(per_shard), 1.0)),
    }


# -- one shard as bytes, for the ranks that train it -----------------------------------------------------------------------


def shard_to_bytes(batch: PackedBatch, shard: int) -> bytes:
    """Raw little-endian arrays under msgpack."""
    message = [
        {
            "bins": [
                {name: getattr(each, name).astype(dtype, copy=False).tobytes() for name, dtype in _DTYPES.items()}
                for each in minibatch.shards[shard]
            ],
            "tokens": minibatch.counts.tokens,
            "sequences": minibatch.counts.sequences,
            "groups": minibatch.counts.groups.tolist(),
            "group_tokens": minibatch.counts.group_tokens.tolist(),
        }
        for minibatch in batch.minibatches
    ]
    packed = msgpack.packb(message)
    assert packed is not None
    return packed


def shard_from_bytes(payload: bytes) -> tuple[Portion, ...]:
    message: list[dict[str, Any]] = msgpack.unpackb(payload)
    return tuple(
        Portion(
            bins=tuple(_bin(arrays) for arrays in update["bins"]),
            counts=StepCounts(
                tokens=update["tokens"],
                sequences=update["sequences"],
                groups=torch.tensor(update["groups"], dtype=torch.int64),
                group_tokens=torch.tensor(update["group_tokens"], dtype=torch.int64),
            ),
        )
        for update in message
    )


def _bin(arrays: dict[str, bytes]) -> Bin:
    decoded: dict[str, Any] = {name: np.frombuffer(arrays[name], dtype) for name, dtype in _DTYPES.items()}
    return Bin(**decoded)
