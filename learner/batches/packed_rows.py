"""Packed rows of numpy arrays. Every column is aligned to the position that predicts the token.

sample      x0  x1  x2  x3          loss_mask  0 0 1 1
token_ids   x0  x1  x2  x3          the model's input
targets     x1  x2  x3  ·           what each position predicts
mask         0   1   1   0          loss_mask, behaviour and advantages move with the targets;
                                    the last position predicts nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.types import Float32s, Int32s, Mask, Sample
from learner.packing.planner import Bins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """One microbatch: T tokens in S sequences. An empty row has T = S = 0."""

    token_ids: Int32s
    positions: Int32s
    """Position ids, from 0 in every sequence."""
    targets: Int32s
    mask: Mask
    behaviour: Float32s
    advantages: Float32s
    rewards: Float32s
    """The rollout's reward at the position that predicts a sample's last trained token; 0 elsewhere."""
    ages: Int32s
    """Version being trained minus the version that sampled the target; 0 where nothing is trained."""
    cu_seqlens: Int32s
    group_ids: Int32s
    """One per sequence: the group's place in the batch."""


DTYPES = {
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
assert set(DTYPES) == {each.name for each in fields(PackedRow)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedSample:
    """A sample to be packed, with the advantage and reward of its rollout."""

    sample: Sample
    trained: int
    """Number of its trained tokens."""
    advantage: float
    reward: float
    version: int
    """Version of the weights being trained."""
    group: int


def fill(sources: Sequence[TrainedSample], planned: Sequence[Bins]) -> tuple[tuple[PackedRow, ...], ...]:
    """Build the rows of every shard. They are views of one array per column."""
    bins = list(chain.from_iterable(planned))
    ordered = [sources[index] for index in chain.from_iterable(bins)]
    columns, groups = _columns(ordered), np.array([each.group for each in ordered], np.int32)
    starts = np.cumsum([0, *(len(each.sample) for each in ordered)])
    made = iter(
        PackedRow(
            **{name: column[starts[first] : starts[last]] for name, column in columns.items()},
            cu_seqlens=(starts[first : last + 1] - starts[first]).astype(np.int32),
            group_ids=groups[first:last],
        )
        for first, last in pairwise(np.cumsum([0, *map(len, bins)]).tolist())
    )
    return tuple(tuple(next(made) for _ in shard) for shard in planned)


def _columns(sources: Sequence[TrainedSample]) -> dict[str, Any]:
    samples = [each.sample for each in sources]
    lengths = [len(sample) for sample in samples]
    mask = predicted([sample.loss_mask for sample in samples], np.uint8)
    counted = np.arange(max(lengths, default=0), dtype=np.int32)
    return {
        "token_ids": joined([sample.token_ids for sample in samples], np.int32),
        "positions": joined([counted[:length] for length in lengths], np.int32),
        "targets": predicted([sample.token_ids for sample in samples], np.int32),
        "mask": mask,
        "behaviour": predicted([sample.logprobs for sample in samples], np.float32),
        "advantages": np.repeat(np.array([each.advantage for each in sources], np.float32), lengths) * mask,
        "rewards": _rewards(sources, lengths),
        "ages": _ages(sources, lengths),
    }


def joined(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    """Concatenate; also no arrays at all."""
    return np.concatenate([*arrays, np.zeros(0, dtype)], dtype=dtype)


def predicted(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    """Shift by one: the value of the token that each position predicts; 0 at the last."""
    nothing = np.zeros(1, dtype)
    return joined([piece for array in arrays for piece in (array[1:], nothing)], dtype)


def _rewards(sources: Sequence[TrainedSample], lengths: Sequence[int]) -> Float32s:
    rewards, start = np.zeros(sum(lengths), np.float32), 0
    for each, length in zip(sources, lengths, strict=True):
        after_last = int(each.sample.loss_mask[::-1].view(np.bool_).argmax())
        rewards[start + length - after_last - 2] = each.reward
        start += length
    return rewards


def _ages(sources: Sequence[TrainedSample], lengths: Sequence[int]) -> Int32s:
    ages, start = np.zeros(sum(lengths), np.int32), 0
    for each, length in zip(sources, lengths, strict=True):
        for span in each.sample.versions:  # no position predicts a token at the very beginning
            ages[start + max(span.start - 1, 0) : start + span.stop - 1] = each.version - span.version
        start += length
    return ages


# -- as little-endian columns, to be broadcast to other ranks ----------------------------------------------------------------


def to_buffers(row: PackedRow) -> list[memoryview]:
    return [getattr(row, name).astype(dtype, copy=False).data for name, dtype in DTYPES.items()]


def from_buffers(buffers: Sequence[bytes]) -> PackedRow:
    """Read what `to_buffers` wrote. The arrays are views of the buffers."""
    columns: dict[str, Any] = {
        name: np.frombuffer(buffer, dtype) for (name, dtype), buffer in zip(DTYPES.items(), buffers, strict=True)
    }
    return PackedRow(**columns)
