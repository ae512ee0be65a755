"""A learner rank's versions, packed and ready to leave. Training goes on meanwhile: what lies here is a copy."""

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
    def __init__(self, layout: WireLayout, parcel: Parcel, device: torch.device, *, shared: bool) -> None:
        self._filling = ParcelPacker(layout, parcel)
        self._num_bytes = parcel.num_bytes
        self._device = device
        self._shared = shared
        self._versions: dict[int, ParcelMemory] = {}
        self._free: list[ParcelMemory] = []
        self._reading = Lock()
        self._readers: Counter[ParcelMemory] = Counter()
        """Threads of this process that are reading; other processes hold a lock of the memory's own."""

    def pack(self, version: int, held: HeldBoxes, *, keep: Collection[int]) -> tuple[tuple[str, ...], str]:
        """Copy what the rank sends of a version. Other versions than those in `keep` may be given up for it.

        Returns the digests of its chunks, and where processes of this machine find its memory.
        """
        with self._reading:
            for other in self._versions.keys() - set(keep):
                self._free.append(self._versions.pop(other))
        memory = self._claimed()
        chunks = self._filling.fill(memory.data, held)
        memory.release()
        self._versions[version] = memory
        return chunks, memory.address

    def parcel(self, version: int) -> torch.Tensor:
        return self._versions[version].data

    def has(self, version: int) -> bool:
        return version in self._versions

    @contextmanager
    def reading(self, version: int) -> Iterator[torch.Tensor]:
        """Its parcel, which stays as it is meanwhile."""
        with self._reading:
            if (memory := self._versions.get(version)) is None:
                raise WireError(f"version {version} has been given up for newer ones")
            self._readers[memory] += 1
        try:
            yield memory.data
        finally:
            with self._reading:
                self._readers -= Counter([memory])

    def _claimed(self) -> ParcelMemory:
        for number, memory in enumerate(self._free):
            if not self._readers[memory] and memory.claim():
                return self._free.pop(number)
        if self._device.type == "cpu":
            self._free.clear()  # whoever still reads them keeps them alive
        memory = ParcelMemory(self._num_bytes, self._device, shared=self._shared)
        memory.claim()
        return memory
