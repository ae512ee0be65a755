"""A learner rank's versions, packed and ready to leave. Training goes on meanwhile: what lies here is a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch

from async_rl.transport.digest import chunk_digest
from async_rl.transport.meeting import Packed
from async_rl.transport.memory import Memory
from async_rl.transport.plan import CHUNK_BYTES, Box, Layout, Parcel

Held = Mapping[Box, torch.Tensor]
"""The boxes that a rank holds, each a tensor of the box's shape."""


class Outbox:
    def __init__(self, layout: Layout, parcel: Parcel, device: torch.device, *, shared: bool) -> None:
        self._dtypes: Mapping[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in layout.specs}
        self._parcel = parcel
        self._device = device
        self._shared = shared
        self._versions: dict[int, Memory] = {}
        self._free: list[Memory] = []

    def pack(self, version: int, held: Held, *, keep: Collection[int]) -> Packed:
        """Copy what the rank sends of a version. Other versions than those in `keep` may be given up for it."""
        for other in self._versions.keys() - set(keep) - {version}:
            self._free.append(self._versions.pop(other))
        memory = self._versions[version] = self._claimed()
        chunks = tuple(self._fill(memory.data, held))
        memory.release()
        return Packed(chunks=chunks, address=memory.address)

    def parcel(self, version: int) -> torch.Tensor:
        return self._versions[version].data

    def _claimed(self) -> Memory:
        for number, memory in enumerate(self._free):
            if memory.claim():
                return self._free.pop(number)
        self._free.clear()  # whoever still reads them keeps them alive
        memory = Memory(self._parcel.num_bytes, self._device, shared=self._shared)
        memory.claim()
        return memory

    def _fill(self, data: torch.Tensor, held: Held) -> Iterator[str]:
        """Each chunk is hashed as soon as it is complete, while it is warm."""
        of_name: dict[str, list[Box]] = defaultdict(list)
        for box in held:
            of_name[box.name].append(box)
        hashed = 0
        for each in self._parcel.slices:
            place = data[each.offset : each.offset + each.num_bytes].view(self._dtypes[each.box.name]).view(each.box.shape)
            place.copy_(_rows_of(each.box, {box: held[box] for box in of_name[each.box.name]}))
            while hashed + CHUNK_BYTES <= each.offset + each.num_bytes:
                yield chunk_digest(data[hashed : hashed + CHUNK_BYTES])
                hashed += CHUNK_BYTES
        while hashed < len(data):
            yield chunk_digest(data[hashed : hashed + CHUNK_BYTES])
            hashed += CHUNK_BYTES


def _rows_of(wanted: Box, held: Held) -> torch.Tensor:
    for box, tensor in held.items():
        if (row := wanted.row_within(box)) is not None:
            return tensor[row : row + wanted.rows] if wanted.shape else tensor
    raise LookupError(f"this rank does not hold {wanted}")
