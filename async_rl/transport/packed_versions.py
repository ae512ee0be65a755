"""The packed versions of one learner rank: copies of its weights, so that training goes on while they are sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import torch

from async_rl.errors import WireError
from async_rl.transport.bulk_copy import copy_all
from async_rl.transport.digest import chunk_digest, chunks_of
from async_rl.transport.gpu_stream import on_host, queued_so_far, transport_stream
from async_rl.transport.plan import Box, Parcel, WireLayout
from async_rl.transport.wire.shared_memory import ParcelMemory

HeldBoxes = Mapping[Box, torch.Tensor]
"""The boxes that a rank holds, each with a tensor of the box's shape."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packed:
    memory: ParcelMemory
    wait: Callable[[], None]
    """Blocks until the copy is complete: on a GPU it is only queued at first."""


class PackedVersions:
    """One rank's parcel of each kept version. Memory is reused once a version is dropped and has no readers."""

    def __init__(self, layout: WireLayout, parcel: Parcel, device: torch.device, *, shared: bool) -> None:
        """`shared`: other processes of this machine may read the parcels in place."""
        self._layout, self._parcel = layout, parcel
        self._device = device
        self._shared = shared
        self._versions: dict[int, _Packed] = {}
        self._free: list[ParcelMemory] = []
        self._lock = Lock()
        self._num_readers: Counter[ParcelMemory] = Counter()
        """Reading threads of this process; readers in other processes hold the memory's file lock."""
        self._places = WeakKeyDictionary[ParcelMemory, list[torch.Tensor]]()
        """The parcel's slices in each memory, as tensors."""
        self._sources: Sequence[tuple[Box, slice | None]] = ()
        """For each slice of the parcel the box that holds it, and its rows there; None: all."""

    def add(self, version: int, held: HeldBoxes, *, keep: Collection[int]) -> None:
        """Copy this rank's parcel of a version, and drop versions that are not in `keep`.

        On a GPU the copies are queued on this thread's stream; what is queued there afterwards may change the weights.
        """
        with self._lock:
            for other in self._versions.keys() - set(keep):
                self._free.append(self._versions.pop(other).memory)
        memory = self._take_free_memory()
        copy_all(zip(self._slices_of(memory), self._held_parts(held), strict=True))
        memory.unlock()
        self._versions[version] = _Packed(memory=memory, wait=queued_so_far(self._device))

    def describe(self, version: int) -> tuple[tuple[str, ...], str]:
        """The digests of the version's chunks, and the address under which processes of this machine open its memory.

        Blocks. Raises WireError when the version was dropped, also meanwhile.
        """
        digests: list[str] = []
        with self._reading(version) as packed, transport_stream(self._device):
            for part in on_host(chunks_of(packed.memory.data)):
                if not self.has(version):
                    raise _gone(version)
                digests.append(chunk_digest(part))
            return tuple(digests), packed.memory.address

    def parcel(self, version: int) -> torch.Tensor:
        return self._versions[version].memory.data

    def has(self, version: int) -> bool:
        return version in self._versions

    @contextmanager
    def open_version(self, version: int) -> Generator[torch.Tensor]:
        """The version's parcel, not overwritten inside the context. Raises WireError when the version was dropped."""
        with self._reading(version) as packed:
            yield packed.memory.data

    @contextmanager
    def _reading(self, version: int) -> Generator[_Packed]:
        with self._lock:
            if (packed := self._versions.get(version)) is None:
                raise _gone(version)
            self._num_readers[packed.memory] += 1
        try:
            packed.wait()
            yield packed
        finally:
            with self._lock:
                self._num_readers -= Counter([packed.memory])

    def _take_free_memory(self) -> ParcelMemory:
        unread = [memory for memory in self._free if not self._num_readers[memory] and memory.lock_exclusively()]
        if unread:  # a push that took longer than a step leaves several, of which one is enough
            self._free = [memory for memory in self._free if memory not in unread]
            return unread[0]
        if self._device.type == "cpu":
            self._free.clear()  # readers keep what they still read alive
        memory = ParcelMemory(self._parcel.num_bytes, self._device, shared=self._shared)
        memory.lock_exclusively()
        return memory

    def _slices_of(self, memory: ParcelMemory) -> list[torch.Tensor]:
        if (known := self._places.get(memory)) is not None:
            return known
        places = self._places[memory] = [
            memory.data[each.offset : each.offset + each.num_bytes].view(_dtype(self._layout, each.box)).view(each.box.shape)
            for each in self._parcel.slices
        ]
        return places

    def _held_parts(self, held: HeldBoxes) -> list[torch.Tensor]:
        if not self._sources or any(box not in held for box, _ in self._sources):
            self._sources = _sources_of([each.box for each in self._parcel.slices], held)
        return [held[box] if rows is None else held[box][rows] for box, rows in self._sources]


def _sources_of(wanted: Sequence[Box], held: Collection[Box]) -> list[tuple[Box, slice | None]]:
    """For each box that is wanted one that contains it, and its rows therein; None: it is the same."""
    by_name: dict[str, list[Box]] = defaultdict(list)
    for box in held:
        by_name[box.name].append(box)
    return [_source_of(box, by_name[box.name]) for box in wanted]


def _source_of(wanted: Box, boxes: Sequence[Box]) -> tuple[Box, slice | None]:
    for box in boxes:
        if wanted == box:
            return box, None
        if (row := wanted.row_within(box)) is not None:
            return box, slice(row, row + wanted.rows)
    raise LookupError(f"this rank does not hold {wanted}")


def _dtype(layout: WireLayout, box: Box) -> torch.dtype:
    return getattr(torch, layout.spec_of[box.name].dtype)


def _gone(version: int) -> WireError:
    return WireError(f"version {version} has been given up for newer ones")
