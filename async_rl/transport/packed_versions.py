"""The packed versions of one learner rank: copies of its weights, so that training goes on while they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from async_rl.errors import WireError
from async_rl.transport.packing import HeldBoxes, ParcelPacker
from async_rl.transport.plan import Parcel, WireLayout
from async_rl.transport.wire.shared_memory import ParcelMemory


class PackedVersions:
    """One rank's parcel of each kept version. Memory is reused once a version is dropped and has no readers."""

    def __init__(self, layout: WireLayout, parcel: Parcel, device: torch.device, *, shared: bool) -> None:
        """`shared`: other processes of this machine may read the parcels in place."""
        self._packer = ParcelPacker(layout, parcel)
        self._num_bytes = parcel.num_bytes
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
        chunks = self._packer.pack_into(memory.data, held)
        memory.unlock()
        self._versions[version] = memory
        return chunks, memory.address

    def parcel(self, version: int) -> torch.Tensor:
        return self._versions[version].data

    def has(self, version: int) -> bool:
        return version in self._versions

    @contextmanager
    def open_version(self, version: int) -> Iterator[torch.Tensor]:
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
        memory = ParcelMemory(self._num_bytes, self._device, shared=self._shared)
        memory.lock_exclusively()
        return memory
