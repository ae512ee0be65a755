"""One sender's parcels to many workers over a torch process group of its own: NCCL where each has a GPU to himself, else gloo.

    sender, rank 0                        workers, rank 1 ... n
    Link.open ◀────── rendezvous ───────▶ Link.open       once, for as long as the cohort stays the same
    send_parcel ───── broadcasts ───────▶ receive_parcel  for every version; ends with an all-reduce: all have all

After any failure a link is poison: it is aborted, and the next attempt meets under a new name. The groups are built directly,
never registered: the process's default group is somebody else's. Everything here blocks; it is called on a thread.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # where torch's own type stubs have it
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, Work

from async_rl.transport.meeting import Meeting, as_wire_error
from async_rl.transport.messages import Backend

_DEPTH = 2
"""Transfers under way at once: while one is on the wire, the last one is hashed."""

_WATCHDOG = timedelta(days=1)
"""NCCL's own watchdog takes the whole process down when it fires; our deadlines are shorter and abort only the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    rendezvous_s: float
    operation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One end's place in a group."""

    group: str
    """Its name in the store: no other group ever has it."""
    rank: int
    size: int
    device: torch.device
    backend: Backend


class Link:
    """A process group that turns whatever torch raises into WireError, with a deadline on every operation."""

    def __init__(self, group: Any, seat: Seat, timeouts: Timeouts, released: Event) -> None:
        self._group = group
        self._seat = seat
        self._operation_s = timeouts.operation_s
        self.released = released
        """Set when nobody waits for this end any more."""

    @classmethod
    def open(cls, meeting: Meeting, seat: Seat, timeouts: Timeouts, released: Event) -> Link:
        meeting = meeting.again()
        with as_wire_error("rendezvous"):
            _call_the_roll(meeting, seat, timeouts)
            group = _nccl(meeting, seat) if seat.backend == "nccl" else _gloo(meeting, seat, timeouts)
        link = cls(group, seat, timeouts, released)
        if seat.backend == "nccl":  # it builds its communicator at the first operation
            link.agree(timeouts.rendezvous_s)
        return link

    def broadcast(self, data: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._operation_s)
        with as_wire_error("broadcast"):
            return self._group.broadcast([data], options)

    def wait(self, work: Work) -> None:
        self._wait(work, self._operation_s)

    def agree(self, within_s: float | None = None) -> None:
        """Return once every rank has come here."""
        deadline_s = within_s if within_s is not None else self._operation_s
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=deadline_s)
        where = self._seat.device if self._seat.backend == "nccl" else "cpu"
        with as_wire_error("all-reduce"):
            work = self._group.allreduce([torch.zeros(1, dtype=torch.int32, device=where)], options)
        self._wait(work, deadline_s)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()

    def _wait(self, work: Work, within_s: float) -> None:
        with as_wire_error("transfer"):
            if self._seat.backend == "nccl":
                self._wait_on_host(work, within_s)
            work.wait()

    def _wait_on_host(self, work: Work, within_s: float) -> None:
        # NCCL's wait() returns once the operation is queued; only the host can give up on one that never ends.
        deadline = time.monotonic() + within_s
        while not work.is_completed():
            if self.released.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"not complete after {within_s:g} s")
            time.sleep(0.0005)


class Links:
    """The groups of one end, kept from version to version as long as its cohorts stay the same."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._idle: dict[str, Link] = {}

    @contextmanager
    def use(self, meeting: Meeting, seat: Seat, released: Event) -> Iterator[Link]:
        """Whoever fails within, ends the link."""
        link = self._idle.pop(seat.group, None)
        if link is None:
            link = Link.open(meeting, seat, self._timeouts, released)
        link.released = released
        try:
            yield link
        except BaseException:
            link.abort()
            raise
        self._idle[seat.group] = link

    def keep_only(self, groups: Collection[str]) -> None:
        for name in self._idle.keys() - set(groups):
            self._idle.pop(name).close()

    def close(self) -> None:
        self.keep_only(())


def send_parcel(link: Link, data: torch.Tensor, transfer_bytes: int) -> None:
    _move(link, data, transfer_bytes, lambda _: None)


def receive_parcel(link: Link, data: torch.Tensor, transfer_bytes: int, landed: Callable[[int], None]) -> None:
    """`landed` hears how many bytes have arrived so far, while the next are on the wire."""
    _move(link, data, transfer_bytes, landed)


def _move(link: Link, data: torch.Tensor, transfer_bytes: int, landed: Callable[[int], None]) -> None:
    under_way: deque[tuple[Work, int]] = deque()

    def land_oldest() -> None:
        work, stop = under_way.popleft()
        link.wait(work)
        landed(stop)

    for start in range(0, len(data), transfer_bytes):
        if len(under_way) == _DEPTH:
            land_oldest()
        part = data[start : start + transfer_bytes]
        under_way.append((link.broadcast(part), start + len(part)))
    while under_way:
        land_oldest()
    link.agree()  # nobody takes a group apart that another still receives from


def _call_the_roll(meeting: Meeting, seat: Seat, timeouts: Timeouts) -> None:
    # Building a group may rightly take long (NCCL) and cannot be interrupted: so first see, quickly, that everybody is there.
    meeting.store.set(f"{seat.group}/here/{seat.rank}", "")
    there = [f"{seat.group}/here/{rank}" for rank in range(seat.size)]
    meeting.store.wait(there, timedelta(seconds=timeouts.operation_s))


def _gloo(meeting: Meeting, seat: Seat, timeouts: Timeouts) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    # Everybody answered the roll call, so the mesh is a matter of milliseconds; and closing the store does not end this wait.
    options._timeout = timedelta(seconds=timeouts.operation_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
    options._threads = _DEPTH
    return ProcessGroupGloo(PrefixStore(seat.group, meeting.store), seat.rank, seat.size, options)


def _nccl(meeting: Meeting, seat: Seat) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds of torch

    torch.cuda.set_device(seat.device)  # the current device belongs to the thread
    options = ProcessGroupNCCL.Options()
    options._timeout = _WATCHDOG
    options.config.blocking = 0
    return ProcessGroupNCCL(PrefixStore(seat.group, meeting.store), seat.rank, seat.size, options)


def _own_address(meeting: Meeting) -> str:
    """The address of the interface that leads to the sender: gloo would otherwise trust this machine's host name."""
    family, kind, protocol, _, address = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
