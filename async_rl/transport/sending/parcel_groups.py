"""Decides which workers share a process group for a parcel, and whether groups of the last push are used again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from async_rl.transport.messages import Backend, ParcelGroup, PushReady
from async_rl.types import VersionRecord

_REMEMBERED = 4
"""Versions before the newest that workers may still hold when the next one is sent."""


class ParcelGroups:
    """Groups are reused until a member fails, leaves or joins; then all are built anew under new names."""

    def __init__(self, fence: int) -> None:
        self._fence = fence
        self._number = 0
        self._newest: tuple[ParcelGroup, ...] = ()
        self._backend: Backend = "gloo"
        self._versions: dict[str, int] = {}
        """The latest versions, by digest."""

    def assign(self, num_parcels: int, ready: Mapping[str, PushReady], backend: Backend) -> tuple[ParcelGroup, ...]:
        """A group for each parcel, with the workers that do not read it from the sender's memory."""
        members = {
            parcel: tuple(sorted(name for name, reply in ready.items() if parcel not in reply.by_memory))
            for parcel in range(num_parcels)
        }
        members = {parcel: names for parcel, names in members.items() if names}
        if members != {group.parcel: group.members for group in self._newest} or backend != self._backend:
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
        """Note a version that is about to be sent: later pushes may use it as the base of deltas."""
        self._versions = {**dict([*self._versions.items()][-_REMEMBERED:]), record.digest: record.version}

    def discard(self) -> None:
        """Build all groups anew for the next push."""
        self._newest = ()
        self._number += 1

    def _base(self, members: Collection[str], ready: Mapping[str, PushReady]) -> int:
        held = {ready[member].holds for member in members}
        return self._versions.get(held.pop(), -1) if len(held) == 1 else -1
