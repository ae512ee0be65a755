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
from async_rl.transport.packed_source import Packed
from async_rl.transport.packed_versions import Outbox
from async_rl.transport.packing import Held
from async_rl.transport.parcel_transfer import Courier
from async_rl.transport.plan import Layout
from async_rl.transport.sending.rank_orders import Errand, Errands, Shelving
from async_rl.transport.wire.http import Serving
from async_rl.transport.wire.process_group import Links, Seat, Timeouts
from async_rl.transport.wire.rendezvous import Meeting
from async_rl.types import VersionRecord


class Depot:
    """One rank's end. `pack` and `complete` belong on the thread that owns the model; everything else on others."""

    def __init__(
        self,
        meeting: Meeting,
        errands: Errands,
        layout: Layout,
        rank: int,
        device: torch.device,
        wire: WireConfig,
        *,
        snapshots: Path | None = None,
    ) -> None:
        self.layout = layout
        self._meeting, self._errands = meeting, errands
        self._device = device
        self._timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._outbox: Outbox | None = None
        if self._number is not None:
            self._outbox = Outbox(layout, layout.parcels[self._number], device, shared=wire.shared_memory)
            self._courier = Courier(self._outbox, pieces(layout, layout.parcels[self._number]), wire)
            self._serving = Serving(meeting.address, self._outbox.reading, self._timeouts.operation_s)
        self.snapshots = snapshots
        """Where live versions are written down; None where they are not."""
        self._links = Links(self._timeouts)
        self._closed = Event()
        self.packed: Mapping[int, tuple[Packed, ...]] = {}
        """By version, all parcels; rank 0's alone is filled. Replaced, never changed: other threads read it."""

    def pack(self, version: int, held: Held, *, keep: Collection[int] = ()) -> Packed | None:
        """Copy this rank's parcel of a version. Of the versions before it, only those in `keep` can still be delivered.

        Returns what rank 0 needs for `complete`; None where the rank sends nothing.
        """
        if self._outbox is None:
            return None
        chunks, address = self._outbox.pack(version, held, keep=keep)
        return Packed(chunks=chunks, address=address, url=self._serving.url)

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

    def complete(self, version: int, packed: Sequence[Packed | None], *, keep: Collection[int] = ()) -> str:
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
                self.deliver([Shelving(parcel=parcel, version=record.version) for parcel in range(len(parcels))], self._closed)
                chunks = tuple(each.chunks for each in parcels)
                snapshot.commit(draft, snapshot.Manifest(record=record, layout=self.layout, chunks=chunks))
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def deliver(self, errands: Sequence[Errand], released: Event) -> None:
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

    def _run(self, errand: Errand, released: Event) -> None:
        if isinstance(errand, Shelving):
            self._shelve(errand)
            return
        seat = Seat(group=errand.group, rank=0, size=errand.size, device=self._device, backend=errand.backend)
        self._links.keep_only({errand.group})
        with self._links.use(self._meeting, seat, released) as link:
            self._courier.send(link, errand.version, errand.base)

    def _shelve(self, errand: Shelving) -> None:
        """Into this rank's own folder: an errand names a version, never a path."""
        if self._outbox is None or self.snapshots is None:
            raise WireError("this rank's configuration names no folder for snapshots (wire.snapshots)")
        try:
            with self._outbox.reading(errand.version) as data:
                snapshot.write_parcel(snapshot.draft_of(self.snapshots, errand.version), errand.parcel, self.layout, data)
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def _sender(self, errand: Errand) -> int:
        return self.layout.parcels[errand.parcel].sender
