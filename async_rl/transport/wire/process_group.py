"""One sender's parcels to many workers over a torch process group of its own: NCCL where each has a GPU to himself, else gloo.

    sender, rank 0                        workers, rank 1 ... n
    Link.open ◀────── rendezvous ───────▶ Link.open       once, for as long as the cohort stays the same
    send_parcel ───── broadcasts ───────▶ receive_parcel  for every version; ends with an all-reduce: all have all

After any failure a link is poison: it is aborted, and the next attempt meets under a new name. The groups are built directly,
never registered: the process's default group is somebody else's. Everything here blocks; it is called on a thread.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # where torch's own type stubs have it
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, Work

from async_rl.transport.messages import Backend
from async_rl.transport.wire import gloo
from async_rl.transport.wire.rendezvous import WireRendezvous, as_wire_error

_DEPTH = 3
"""Transfers under way at once, each over a connection of its own where gloo carries them: one alone does not fill the way."""

_SMALL = 8
"""Members, with the sender, of a group that has so many connections for each pair. In larger ones a pair has one: gloo connects
everybody with everybody before anything can be sent, and a tree of receivers keeps the way filled.
"""

_WATCHDOG = timedelta(days=1)
"""NCCL's own watchdog takes the whole process down when it fires; our deadlines are shorter and abort only the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTimeouts:
    rendezvous_s: float
    operation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRank:
    """One end's place in a group."""

    group: str
    """Its name in the store: no other group ever has it."""
    rank: int
    size: int
    device: torch.device
    backend: Backend


OnReceived = Callable[[int], None]
"""Told how many bytes of a parcel have arrived so far, in order: they are verified while the next are on their way."""


class Link:
    """A process group that turns whatever torch raises into WireError, with a deadline on every operation."""

    def __init__(self, group: Any, seat: GroupRank, timeouts: WireTimeouts, released: Event) -> None:
        self._group = group
        self._seat = seat
        self._operation_s = timeouts.operation_s
        self.released = released
        """Set when nobody waits for this end any more."""
        self.bytes_per_s = 0.0
        """At which the last whole parcel travelled; 0 before the first."""

    @classmethod
    def open(cls, meeting: WireRendezvous, seat: GroupRank, timeouts: WireTimeouts, released: Event) -> Link:
        with as_wire_error("rendezvous"):
            _call_the_roll(meeting, seat, timeouts)
            group = _nccl(meeting, seat, timeouts) if seat.backend == "nccl" else _gloo(meeting, seat, timeouts)
        link = cls(group, seat, timeouts, released)
        if seat.backend == "nccl":  # it builds its communicator at the first operation
            link.wait(link.begin_agreement(timeouts.rendezvous_s), timeouts.rendezvous_s)
        return link

    def number(self, value: int) -> torch.Tensor:
        """To be broadcast."""
        return torch.tensor([value], device=self._seat.device if self._seat.backend == "nccl" else "cpu")

    def broadcast(self, data: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._operation_s)
        with as_wire_error("broadcast"):
            return self._group.broadcast([data], options)

    def wait(self, work: Work, within_s: float | None = None) -> None:
        with as_wire_error("transfer"):
            if self._seat.backend == "nccl":
                self._wait_on_host(work, within_s if within_s is not None else self._operation_s)
            work.wait()

    def begin_agreement(self, within_s: float | None = None) -> Work:
        """Complete once every rank has come here."""
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=within_s if within_s is not None else self._operation_s)
        where = self._seat.device if self._seat.backend == "nccl" else "cpu"
        with as_wire_error("all-reduce"):
            return self._group.allreduce([torch.zeros(1, dtype=torch.int32, device=where)], options)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()

    def _wait_on_host(self, work: Work, within_s: float) -> None:
        # NCCL's wait() returns once the operation is queued; only the host can give up on one that never ends.
        deadline = time.monotonic() + within_s
        while not work.is_completed():
            if self.released.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"not complete after {within_s:g} s")
            time.sleep(0.0005)


class LinkPool:
    """The groups of one end, kept from version to version as long as its cohorts stay the same."""

    def __init__(self, timeouts: WireTimeouts) -> None:
        self._timeouts = timeouts
        self._idle: dict[str, Link] = {}

    @contextmanager
    def use(self, meeting: WireRendezvous, seat: GroupRank, released: Event) -> Iterator[Link]:
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
    stop = 0

    def finish_oldest() -> int:
        work, stop = under_way.popleft()
        link.wait(work)
        return stop

    for start in range(0, len(data), transfer_bytes):
        if len(under_way) == _DEPTH:
            stop = finish_oldest()
        part = data[start : start + transfer_bytes]
        under_way.append((link.broadcast(part), start + len(part)))
        landed(stop)  # with as much under way as there can be
    while under_way:
        landed(stop)
        stop = finish_oldest()
    agreement = link.begin_agreement()  # nobody takes a group apart that another still receives from
    landed(stop)
    link.wait(agreement)


def _call_the_roll(meeting: WireRendezvous, seat: GroupRank, timeouts: WireTimeouts) -> None:
    # Building a group may rightly take long (NCCL) and cannot be interrupted: so first see, quickly, that everybody is there.
    meeting.store.set(f"{seat.group}/here/{seat.rank}", "")
    there = [f"{seat.group}/here/{rank}" for rank in range(seat.size)]
    meeting.store.wait(there, timedelta(seconds=timeouts.operation_s))


def _gloo(meeting: WireRendezvous, seat: GroupRank, timeouts: WireTimeouts) -> ProcessGroupGloo:
    store = PrefixStore(seat.group, meeting.store)
    # Everybody answered the roll call, so the mesh is a matter of milliseconds.
    timeout = timedelta(seconds=timeouts.operation_s)
    connections = _DEPTH if seat.size <= _SMALL else 1
    return _built_within(
        timeouts.operation_s,
        lambda: gloo.connect(
            store, seat.rank, seat.size, host=meeting.address, timeout=timeout, connections=connections, threads=_DEPTH
        ),
    )


def _built_within(seconds: float, build: Callable[[], ProcessGroupGloo]) -> ProcessGroupGloo:
    """gloo takes its timeout for each of several tries to connect; the thread that goes on with them is left to itself."""
    built: Future[ProcessGroupGloo] = Future()

    def run() -> None:
        try:
            built.set_result(build())
        except Exception as error:
            built.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    try:
        return built.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"the group was not connected within {seconds:g} s") from None


def _nccl(meeting: WireRendezvous, seat: GroupRank, timeouts: WireTimeouts) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds of torch

    torch.cuda.set_device(seat.device)  # the current device belongs to the thread
    options = ProcessGroupNCCL.Options()
    options._timeout = _WATCHDOG
    options.config.blocking = 0
    return ProcessGroupNCCL(_store_for_nccl(meeting, seat, timeouts), seat.rank, seat.size, options)


def _store_for_nccl(meeting: WireRendezvous, seat: GroupRank, timeouts: WireTimeouts) -> Store:
    """One of torch's own, for this group's rendezvous alone: NCCL's threads ask it from C++ for as long as the group lives.

    The sender keeps it, at an address that the others learn from the run's Redis. It asks for no password, as NCCL's own
    sockets do not: see docs/weights.md. This has not run on GPUs since the wire's other keys moved to Redis.
    """
    where, wait = f"{seat.group}/nccl", timedelta(seconds=timeouts.rendezvous_s)
    if seat.rank > 0:
        meeting.store.wait([where], wait)
        host, _, port = meeting.store.get(where).decode().rpartition(" ")
        return TCPStore(host, int(port), wait_for_workers=False, timeout=wait)
    family = socket.getaddrinfo(meeting.address, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((meeting.address, 0), family=family)  # not at every interface, as torch would
    port = listening.getsockname()[1]
    store = TCPStore(
        meeting.address, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listening.detach()
    )
    meeting.store.set(where, f"{meeting.address} {port}")
    return store
