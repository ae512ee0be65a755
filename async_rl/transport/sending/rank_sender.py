"""Where a learner's versions leave from: every rank packs and sends its own parcel, rank 0 says when.

    rank 0                                                        rank k
    pack ── own parcel                                            pack ── own parcel
    complete ◀───────────── what it packed, gathered by the learner ◀──┘
    deliver, shelve ─────── errands, over the wire's store ──────▶ follow

Packing happens where the model is, between two steps; all else on threads, while training goes on. Every rank also serves what
it packed to whoever comes for it (wire/http.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import Event

import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport import snapshot
from async_rl.transport.delta.difference import pieces
from async_rl.transport.digest import version_digest
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.packing import HeldBoxes
from async_rl.transport.parcel_transfer import ParcelSender
from async_rl.transport.plan import WireLayout
from async_rl.transport.sending.rank_orders import WireOrder, WireOrders, WriteParcel
from async_rl.transport.wire.http import ParcelServer
from async_rl.transport.wire.process_group import GroupRank, LinkPool, WireTimeouts
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.types import VersionRecord


class RankSender:
    """One rank's end. `pack` and `complete` belong on the thread that owns the model; everything else on others."""

    def __init__(
        self,
        meeting: WireRendezvous,
        errands: WireOrders,
        layout: WireLayout,
        rank: int,
        device: torch.device,
        wire: WireConfig,
        *,
        snapshots: Path | None = None,
    ) -> None:
        self.layout = layout
        self._meeting, self._errands = meeting, errands
        self._device = device
        self._timeouts = WireTimeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._outbox: PackedVersions | None = None
        if self._number is not None:
            self._outbox = PackedVersions(layout, layout.parcels[self._number], device, shared=wire.shared_memory)
            self._courier = ParcelSender(self._outbox, pieces(layout, layout.parcels[self._number]), wire)
            self._serving = ParcelServer(meeting.address, self._outbox.reading, self._timeouts.operation_s)
        self.snapshots = snapshots
        """Where live versions are written down; None where they are not."""
        self._links = LinkPool(self._timeouts)
        self._closed = Event()
        self.packed: Mapping[int, tuple[PackedParcel, ...]] = {}
        """By version, all parcels; rank 0's alone is filled. Replaced, never changed: other threads read it."""

    def pack(self, version: int, held: HeldBoxes, *, keep: Collection[int] = ()) -> PackedParcel | None:
        """Copy this rank's parcel of a version. Of the versions before it, only those in `keep` can still be delivered.

        Returns what rank 0 needs for `complete`; None where the rank sends nothing.
        """
        if self._outbox is None:
            return None
        chunks, address = self._outbox.pack(version, held, keep=keep)
        return PackedParcel(chunks=chunks, address=address, url=self._serving.url)

    def parcel(self, version: int) -> torch.Tensor:
        """This rank's, as it leaves."""
        assert self._outbox is not None
        return self._outbox.parcel(version)

    @property
    def num_differences(self) -> int:
        """That this rank has sent instead of whole parcels."""
        return self._courier.num_differences

    def follow(self) -> None:
        """A rank above 0: start doing what rank 0 says, on a thread of its own, until `close`."""
        self._errands.follow(self._number, lambda errand: self._run(errand, self._closed))

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def complete(self, version: int, packed: Sequence[PackedParcel | None], *, keep: Collection[int] = ()) -> str:
        """`packed`: what each rank's `pack` returned, in their order. Returns what `VersionRecord.digest` must be."""
        parcels = tuple(each for each in packed if each is not None)
        self.packed = {known: each for known, each in self.packed.items() if known in keep} | {version: parcels}
        return version_digest(self.layout.digest, [each.chunks for each in parcels])

    def shelve(self, record: VersionRecord) -> None:
        """Leave a snapshot of a version that is packed. Raises WireError when that fails."""
        assert self.snapshots is not None
        parcels = self.packed.get(record.version)
        if parcels is None:
            raise WireError(f"version {record.version} has been given up for newer ones")
        try:
            with snapshot.drafting(self.snapshots, record.version) as draft:
                self.deliver(
                    [WriteParcel(parcel=parcel, version=record.version) for parcel in range(len(parcels))], self._closed
                )
                chunks = tuple(each.chunks for each in parcels)
                snapshot.commit(draft, snapshot.SnapshotManifest(record=record, layout=self.layout, chunks=chunks))
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def deliver(self, errands: Sequence[WireOrder], released: Event) -> None:
        """All of them at once. Returns when everybody has everything; raises WireError when somebody has not."""
        others = [errand for errand in errands if self._sender(errand) != 0]
        number = self._errands.give(others) if others else -1
        for errand in errands:
            if self._sender(errand) == 0:
                self._run(errand, released)
        for sender in {self._sender(errand) for errand in others}:
            self._errands.outcome(number, sender, self._timeouts.rendezvous_s)

    def close(self) -> None:
        self._closed.set()
        self._errands.close()
        if self._outbox is not None:
            self._serving.close()
        self._links.close()

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _run(self, errand: WireOrder, released: Event) -> None:
        if isinstance(errand, WriteParcel):
            self._shelve(errand)
            return
        seat = GroupRank(group=errand.group, rank=0, size=errand.size, device=self._device, backend=errand.backend)
        self._links.keep_only({errand.group})
        with self._links.use(self._meeting, seat, released) as link:
            self._courier.send(link, errand.version, errand.base)

    def _shelve(self, errand: WriteParcel) -> None:
        """Into this rank's own folder: an errand names a version, never a path."""
        if self._outbox is None or self.snapshots is None:
            raise WireError("this rank's configuration names no folder for snapshots (wire.snapshots)")
        try:
            with self._outbox.reading(errand.version) as data:
                snapshot.write_parcel(snapshot.draft_of(self.snapshots, errand.version), errand.parcel, self.layout, data)
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def _sender(self, errand: WireOrder) -> int:
        return self.layout.parcels[errand.parcel].sender
