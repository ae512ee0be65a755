"""Copies the tensors that a rank holds into the flat parcel that it sends, hashing each piece while it is in the cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from async_rl.transport.digest import ChunkHasher
from async_rl.transport.plan import Box, Parcel, Slice, WireLayout

HeldBoxes = Mapping[Box, torch.Tensor]
"""The boxes that a rank holds, each with a tensor of the box's shape."""

_PIECE_BYTES = 256 << 10
"""Small enough to be in a core's cache when it is hashed, large enough that the calls cost nothing."""


class ParcelPacker:
    def __init__(self, layout: WireLayout, parcel: Parcel) -> None:
        self._dtypes: Mapping[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in layout.specs}
        self._parcel = parcel

    def pack_into(self, data: torch.Tensor, held: HeldBoxes) -> tuple[str, ...]:
        """Fill `data` with the parcel; returns the digests of its chunks."""
        by_name: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for box, tensor in held.items():
            by_name[box.name].append((box, tensor))
        hasher = ChunkHasher(data)
        for each in self._parcel.slices:
            place = data[each.offset : each.offset + each.num_bytes].view(self._dtypes[each.box.name]).view(each.box.shape)
            for copied in _copy(_rows_of(each.box, by_name[each.box.name]), place, each):
                if copied - hasher.num_hashed >= _PIECE_BYTES:
                    hasher.hash_up_to(copied)
        hasher.hash_up_to(len(data))
        return tuple(hasher.digests)


def _copy(source: torch.Tensor, place: torch.Tensor, into: Slice) -> Iterator[int]:
    """Copy piece by piece; yields the end of what is copied, as an offset in the parcel."""
    rows = into.box.rows
    at_once = max(1, rows * _PIECE_BYTES // max(1, into.num_bytes))
    if at_once >= rows or place.device.type != "cpu":
        place.copy_(source)
    else:
        for row in range(0, rows, at_once):
            place[row : row + at_once].copy_(source[row : row + at_once])
            yield into.offset + min(row + at_once, rows) * (into.num_bytes // rows)
    yield into.offset + into.num_bytes


def _rows_of(wanted: Box, held: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    for box, tensor in held:
        if (row := wanted.row_within(box)) is not None:
            return tensor[row : row + wanted.rows] if wanted.shape else tensor
    raise LookupError(f"this rank does not hold {wanted}")
