"""Where a learner's versions leave from: every rank packs and sends its own parcel, rank 0 says when.

    rank 0                           the store of the meeting                      rank k
    pack ── own parcel ─────────────▶ packed/VERSION/PARCEL ◀────────────────────── pack
    deliver(errands) ───────────────▶ errands/N ──────────────────────────────────▶ follow
            ◀──────────────────────── done/N/k ◀──────────────────────────────────── what became of it

Packing happens where the model is, between two steps; delivering on threads, while training goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event

import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.digest import version_digest
from async_rl.transport.link import Links, Seat, Timeouts, send_parcel
from async_rl.transport.meeting import Meeting, Packed, as_wire_error
from async_rl.transport.messages import Backend
from async_rl.transport.outbox import Held, Outbox
from async_rl.transport.plan import Box, Layout, lay_out

_LOOK_UP = timedelta(seconds=2)
"""How long a rank waits for an errand before it looks whether it should end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Bring a parcel to a cohort of workers."""

    parcel: int
    version: int
    group: str
    size: int
    """Of the group: the workers, and their sender."""
    backend: Backend


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

    def __init__(self, meeting: Meeting, layout: Layout, rank: int, device: torch.device, wire: WireConfig) -> None:
        self.layout = layout
        self.meeting = meeting
        self._rank = rank
        self._device = device
        self._timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._transfer_bytes = int(wire.bucket_mb * (1 << 20))
        self._number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._outbox: Outbox | None = None
        if self._number is not None:
            self._outbox = Outbox(layout, layout.parcels[self._number], device, shared=wire.shared_memory)
        self._links = Links(self._timeouts)
        self._num_errands = 0
        self._closed = Event()
        self._following: threading.Thread | None = None

    def pack(self, version: int, held: Held, *, keep: Collection[int] = ()) -> None:
        """Copy this rank's parcel of a version. Of the versions before it, only those in `keep` can still be delivered."""
        if self._outbox is not None and self._number is not None:
            self.meeting.post_packed(version, self._number, self._outbox.pack(version, held, keep=keep))

    def parcel(self, version: int) -> torch.Tensor:
        """This rank's, as it leaves."""
        assert self._outbox is not None
        return self._outbox.parcel(version)

    def packed(self, version: int) -> tuple[Packed, ...]:
        """By all ranks; rank 0 asks, after its own `pack`."""
        return self.meeting.packed(version, len(self.layout.parcels))

    def digest(self, version: int) -> str:
        """What `VersionRecord.digest` must be."""
        return version_digest(self.layout.digest, [each.chunks for each in self.packed(version)])

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def deliver(self, errands: Sequence[Errand], released: Event) -> None:
        """All of them at once. Returns when everybody has everything; raises WireError when somebody has not."""
        number, self._num_errands = self._num_errands, self._num_errands + 1
        others = [errand for errand in errands if self._sender(errand) != 0]
        self.meeting.store.set(f"errands/{number}", json.dumps([asdict(errand) for errand in others]))
        for errand in errands:
            if self._sender(errand) == 0:
                self._run(errand, released)
        for errand in others:
            self._hear_of(number, errand)

    def _hear_of(self, number: int, errand: Errand) -> None:
        key = f"done/{number}/{self._sender(errand)}"
        with as_wire_error(f"learner rank {self._sender(errand)} does not answer"):
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
                told = json.loads(store.get(f"errands/{number}"))
            except RuntimeError:  # nothing to do for a while; or rank 0 is gone, and this process will hear of it elsewhere
                if self._closed.wait(0.1):
                    return
                continue
            for row in told:
                errand = Errand(**row)
                if self._sender(errand) == self._rank:  # on its own thread: one that waits for the dead delays no other
                    threading.Thread(target=self._report, args=(number, errand), name="weight-errand", daemon=True).start()
            number += 1

    def _report(self, number: int, errand: Errand) -> None:
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
        self._links.close()

    # -- every rank ------------------------------------------------------------------------------------------------------

    def _run(self, errand: Errand, released: Event) -> None:
        seat = Seat(group=errand.group, rank=0, size=errand.size, device=self._device, backend=errand.backend)
        self._links.keep_only({errand.group})
        with self._links.use(self.meeting, seat, released) as link:
            send_parcel(link, self.parcel(errand.version), self._transfer_bytes)

    def _sender(self, errand: Errand) -> int:
        return self.layout.parcels[errand.parcel].sender
