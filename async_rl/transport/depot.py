"""Where a learner's versions leave from: every rank packs and sends its own parcel, rank 0 says when.

    rank 0                           the store of the meeting                      rank k
    pack ── own parcel ─────────────▶ packed/VERSION/PARCEL ◀────────────────────── pack
    deliver(errands), shelve ───────▶ errands/N ──────────────────────────────────▶ follow
            ◀──────────────────────── done/N/k ◀──────────────────────────────────── what became of it

Packing happens where the model is, between two steps; all else on threads, while training goes on. Every rank also serves what
it packed to whoever comes for it (serving.py).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event

import torch
from pydantic import TypeAdapter

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.failpoints import define, failpoint
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport import snapshot
from async_rl.transport.courier import Courier
from async_rl.transport.delta.difference import pieces
from async_rl.transport.digest import version_digest
from async_rl.transport.filling import Held
from async_rl.transport.link import Links, Seat, Timeouts
from async_rl.transport.meeting import Meeting, Packed, as_wire_error
from async_rl.transport.messages import Backend
from async_rl.transport.outbox import Outbox
from async_rl.transport.plan import Box, Layout, lay_out
from async_rl.transport.serving import Serving
from async_rl.types import VersionRecord

define("wire.errand")

_LOOK_UP = timedelta(seconds=2)
"""How long a rank waits for an errand before it looks whether it should end."""

_REMEMBERED = 64
"""Of so many versions that were given up the digests stay: a worker that is late with a question would wait for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelving:
    """Write a parcel down, for workers that come when nobody can send it."""

    parcel: int
    version: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Bring a parcel to a cohort of workers."""

    parcel: int
    version: int
    group: str
    size: int
    """Of the group: the workers, and their sender."""
    backend: Backend
    base: int
    """The version that all of them hold, to which a difference may be sent; -1 if there is none."""


Job = Errand | Shelving
_JOBS = TypeAdapter(list[Job])


def agree_on_layout(meeting: Meeting, specs: Sequence[ParameterSpec], held: Sequence[Box], *, rank: int, ranks: int) -> Layout:
    """All ranks call it, each with what it holds; all get the same layout."""
    if rank > 0:
        meeting.post_held(rank, held)
        return meeting.layout()
    layout = lay_out(specs, {0: held} | {other: meeting.held(other) for other in range(1, ranks)})
    meeting.post_layout(layout)
    return layout


class Depot:
    """One rank's end. `pack` belongs on the thread that owns the model; everything else on others."""

    def __init__(
        self,
        meeting: Meeting,
        layout: Layout,
        rank: int,
        device: torch.device,
        wire: WireConfig,
        *,
        snapshots: Path | None = None,
    ) -> None:
        self.layout = layout
        self.meeting = meeting
        self._rank = rank
        self._device = device
        self._timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._outbox: Outbox | None = None
        if self._number is not None:
            self._outbox = Outbox(layout, layout.parcels[self._number], device, shared=wire.shared_memory)
            self._courier = Courier(self._outbox, pieces(layout, layout.parcels[self._number]), wire)
            self._serving = Serving(meeting.own_address(), self._outbox.reading, self._timeouts.operation_s)
            meeting.post_url(self._number, self._serving.url)
        self.snapshots = snapshots
        """Where live versions are written down; None where they are not."""
        self._links = Links(self._timeouts)
        self._numbers = count()
        """Of errands. Two threads may give some out at the same time."""
        self._posted: set[int] = set()
        """The versions that the store knows of."""
        self._closed = Event()
        self._following: threading.Thread | None = None

    def pack(self, version: int, held: Held, *, keep: Collection[int] = ()) -> None:
        """Copy this rank's parcel of a version. Of the versions before it, only those in `keep` can still be delivered."""
        if self._outbox is not None and self._number is not None:
            self.meeting.post_packed(version, self._number, self._outbox.pack(version, held, keep=keep))
            self._posted.add(version)
            for old in sorted(self._posted - set(keep))[:-_REMEMBERED]:
                self.meeting.forget_packed(old, self._number)
                self._posted.remove(old)

    def parcel(self, version: int) -> torch.Tensor:
        """This rank's, as it leaves."""
        assert self._outbox is not None
        return self._outbox.parcel(version)

    @property
    def num_differences(self) -> int:
        """That this rank has sent instead of whole parcels."""
        return self._courier.num_differences

    def packed(self, version: int) -> tuple[Packed, ...]:
        """By all ranks; rank 0 asks, after its own `pack`."""
        return self.meeting.packed(version, len(self.layout.parcels))

    def digest(self, version: int) -> str:
        """What `VersionRecord.digest` must be."""
        return version_digest(self.layout.digest, [each.chunks for each in self.packed(version)])

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def shelve(self, record: VersionRecord) -> None:
        """Leave a snapshot of a version that is packed. Raises WireError when that fails."""
        assert self.snapshots is not None
        parcels = range(len(self.layout.parcels))
        try:
            with snapshot.drafting(self.snapshots, record.version) as draft:
                jobs = [Shelving(parcel=parcel, version=record.version, folder=str(draft)) for parcel in parcels]
                self.deliver(jobs, self._closed)
                chunks = tuple(each.chunks for each in self.meeting.again().packed(record.version, len(parcels)))
                snapshot.commit(draft, snapshot.Manifest(record=record, layout=self.layout, chunks=chunks))
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def deliver(self, errands: Sequence[Job], released: Event) -> None:
        """All of them at once. Returns when everybody has everything; raises WireError when somebody has not."""
        senders = {self._sender(errand) for errand in errands} - {0}
        number = next(self._numbers) if senders else -1
        if senders:
            others = [errand for errand in errands if self._sender(errand) in senders]
            self.meeting.store.set(f"errands/{number}", _JOBS.dump_json(others).decode())
        for errand in errands:
            if self._sender(errand) == 0:
                self._run(errand, released)
        for sender in senders:
            self._hear_of(number, sender)

    def _hear_of(self, number: int, sender: int) -> None:
        key = f"done/{number}/{sender}"
        with as_wire_error(f"learner rank {sender} does not answer"):
            store = self.meeting.again().store
            store.wait([key], timedelta(seconds=self._timeouts.rendezvous_s))
            problem = store.get(key).decode()
        if problem:
            raise WireError(problem)

    # -- the others ------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Start doing what rank 0 says, on a thread of its own, until `close`."""
        self._following = threading.Thread(target=self._follow, name="weight-errands", daemon=True)
        self._following.start()

    def _follow(self) -> None:
        number, store = 0, self.meeting.again().store
        while not self._closed.is_set():
            try:
                store.wait([f"errands/{number}"], _LOOK_UP)
                told = _JOBS.validate_json(store.get(f"errands/{number}"))
            except RuntimeError:  # nothing to do for a while; or rank 0 is gone, and this process will hear of it elsewhere
                if self._closed.wait(0.1):
                    return
                continue
            for errand in told:
                if self._sender(errand) == self._rank:  # on its own thread: one that waits for the dead delays no other
                    threading.Thread(target=self._report, args=(number, errand), name="weight-errand", daemon=True).start()
            number += 1

    def _report(self, number: int, errand: Job) -> None:
        failpoint("wire.errand")
        problem = ""
        try:
            self._run(errand, self._closed)
        except WireError as error:
            problem = f"learner rank {self._rank}: {error}"
        with suppress(RuntimeError):  # rank 0 is gone
            self.meeting.store.set(f"done/{number}/{self._rank}", problem)

    def close(self) -> None:
        self._closed.set()
        if self._following is not None:
            self._following.join()  # a process that ends while a thread of its is in the store is aborted
        if self._outbox is not None:
            self._serving.close()
        self._links.close()

    # -- every rank ------------------------------------------------------------------------------------------------------

    def _run(self, errand: Job, released: Event) -> None:
        if isinstance(errand, Shelving):
            self._shelve(errand)
            return
        seat = Seat(group=errand.group, rank=0, size=errand.size, device=self._device, backend=errand.backend)
        self._links.keep_only({errand.group})
        with self._links.use(self.meeting, seat, released) as link:
            self._courier.send(link, errand.version, errand.base)

    def _shelve(self, errand: Shelving) -> None:
        assert self._outbox is not None
        try:
            with self._outbox.reading(errand.version) as data:
                snapshot.write_parcel(Path(errand.folder), errand.parcel, self.layout, data)
        except OSError as error:
            raise WireError(f"cannot write to {errand.folder}: {error.strerror}") from error

    def _sender(self, errand: Job) -> int:
        return self.layout.parcels[errand.parcel].sender
