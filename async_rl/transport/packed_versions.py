"""The packed versions of one learner rank: copies of its weights, so that training goes on while they are sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

from async_rl.errors import WireError
from async_rl.transport.digest import ChunkHasher
from async_rl.transport.plan import Box, Parcel, Slice, WireLayout
from async_rl.transport.wire.shared_memory import ParcelMemory

HeldBoxes = Mapping[Box, torch.Tensor]
"""The boxes that a rank holds, each with a tensor of the box's shape."""

_PIECE_BYTES = 256 << 10
"""Small enough to be in a core's cache when it is hashed, large enough that the calls cost nothing."""


class PackedVersions:
    """One rank's parcel of each kept version. Memory is reused once a version is dropped and has no readers."""

    def __init__(self, layout: WireLayout, parcel: Parcel, device: torch.device, *, shared: bool) -> None:
        """`shared`: other processes of this machine may read the parcels in place."""
        self._layout, self._parcel = layout, parcel
        self._device = device
        self._shared = shared
        self._versions: dict[int, ParcelMemory] = {}
        self._free: list[ParcelMemory] = []
        self._lock = Lock()
        self._num_readers: Counter[ParcelMemory] = Counter()
        """Reading threads of this process; readers in other processes hold the memory's file lock."""

    def add(self, version: int, held: HeldBoxes, *, keep: Collection[int]) -> tuple[tuple[str, ...], str]:
        """Copy this rank's parcel of a version, and drop versions that are not in `keep`.

        Returns the digests of its chunks, and the address under which processes of this machine open its memory.
        """
        with self._lock:
            for other in self._versions.keys() - set(keep):
                self._free.append(self._versions.pop(other))
        memory = self._take_free_memory()
        chunks = _pack_into(memory.data, self._layout, self._parcel, held)
        memory.unlock()
        self._versions[version] = memory
        return chunks, memory.address

    def parcel(self, version: int) -> torch.Tensor:
        return self._versions[version].data

    def has(self, version: int) -> bool:
        return version in self._versions

    @contextmanager
    def open_version(self, version: int) -> Generator[torch.Tensor]:
        """The version's parcel, not overwritten inside the context. Raises WireError when the version was dropped."""
        with self._lock:
            if (memory := self._versions.get(version)) is None:
                raise WireError(f"version {version} has been given up for newer ones")
            self._num_readers[memory] += 1
        try:
            yield memory.data
        finally:
            with self._lock:
                self._num_readers -= Counter([memory])

    def _take_free_memory(self) -> ParcelMemory:
        for number, memory in enumerate(self._free):
            if not self._num_readers[memory] and memory.lock_exclusively():
                return self._free.pop(number)
        if self._device.type == "cpu":
            self._free.clear()  # readers keep what they still read alive
        memory = ParcelMemory(self._parcel.num_bytes, self._device, shared=self._shared)
        memory.lock_exclusively()
        return memory


def _pack_into(data: torch.Tensor, layout: WireLayout, parcel: Parcel, held: HeldBoxes) -> tuple[str, ...]:
    """Copy what the rank holds into its flat parcel, hashing each piece while it is in the cache.

    Returns the digests of the parcel's chunks.
    """
    by_name: dict[str, list[Box]] = defaultdict(list)
    for box in held:
        by_name[box.name].append(box)
    hasher = ChunkHasher(data)
    for each in parcel.slices:
        dtype: torch.dtype = getattr(torch, layout.spec_of[each.box.name].dtype)
        place = data[each.offset : each.offset + each.num_bytes].view(dtype).view(each.box.shape)
        for copied in _copy(_rows_of(each.box, by_name[each.box.name], held), place, each):
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


def _rows_of(wanted: Box, boxes: Sequence[Box], held: HeldBoxes) -> torch.Tensor:
    for box in boxes:
        if (row := wanted.row_within(box)) is not None:
            return held[box][row : row + wanted.rows] if wanted.shape else held[box]
    raise LookupError(f"this rank does not hold {wanted}")
