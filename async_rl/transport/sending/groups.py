"""Which workers share a process group, and whether the one from before can be used again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from async_rl.transport.messages import Backend, ParcelGroup, PushReady
from async_rl.types import VersionRecord

_REMEMBERED = 4
"""Versions before the newest that workers may still hold when its successor comes."""


class ParcelGroups:
    """A group lives until one of its members fails, leaves or is joined by another: then everybody meets anew."""

    def __init__(self, fence: int) -> None:
        self._fence = fence
        self._number = 0
        self._newest: tuple[ParcelGroup, ...] = ()
        self._backend: Backend = "gloo"
        self._versions: dict[str, int] = {}
        """The latest, by digest."""

    def wires(self, parcels: int, ready: Mapping[str, PushReady], backend: Backend) -> tuple[ParcelGroup, ...]:
        """Who gets which parcel over which group; nobody who reads it from its sender's memory."""
        members = {
            parcel: tuple(sorted(name for name, reply in ready.items() if parcel not in reply.by_memory))
            for parcel in range(parcels)
        }
        members = {parcel: names for parcel, names in members.items() if names}
        if members != {wire.parcel: wire.members for wire in self._newest} or backend != self._backend:
            self._number += 1
        self._backend = backend
        self._newest = tuple(
            ParcelGroup(
                parcel=parcel, group=f"{self._fence}/{self._number}/{parcel}", members=names, base=self._base(names, ready)
            )
            for parcel, names in members.items()
        )
        return self._newest

    def remember(self, record: VersionRecord) -> None:
        """It goes out: workers may hold it soon."""
        self._versions = {**dict([*self._versions.items()][-_REMEMBERED:]), record.digest: record.version}

    def _base(self, members: Collection[str], ready: Mapping[str, PushReady]) -> int:
        held = {ready[member].holds for member in members}
        return self._versions.get(held.pop(), -1) if len(held) == 1 else -1

    def broke(self) -> None:
        """Nobody uses the last groups again: all meet anew."""
        self._newest = ()
        self._number += 1
