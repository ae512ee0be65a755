"""Broadcasts a sender's parcel to many workers over a torch process group: NCCL if each rank has its own GPU, else gloo.

    sender, rank 0                        workers, rank 1 ... n
    Link.open ◀────── rendezvous ───────▶ Link.open       once, reused while the members stay the same
    broadcast_whole ─ broadcasts ───────▶ broadcast_whole for every version; ends with a barrier

After any failure a link is aborted, and the next attempt builds a group of another name. The groups are built directly and
never registered: the process's default group belongs to Megatron. Everything here blocks; call it on a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import structlog
import torch
from torch._C._distributed_c10d import PrefixStore  # where torch's own type stubs have it
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, Work

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.supervision.liveness.daemon_thread import start_daemon_thread
from async_rl.supervision.processes.descriptors import many_descriptors
from async_rl.transport.messages import Backend
from async_rl.transport.wire import gloo, nccl
from async_rl.transport.wire.rendezvous import WireRendezvous, as_wire_error

_DEPTH = 3
"""Transfers in flight; with gloo each has its own connection, because one does not use the whole bandwidth."""

_SMALL = 8
"""Ranks up to which a group has `_DEPTH` connections per pair. Larger groups have one: gloo connects every pair before anything
can be sent, and a broadcast tree uses the whole bandwidth anyway.
"""

_ABORT_S = 5.0
"""Wait for NCCL to stop the kernels of an aborted group, at most; then they and the memory that they use are left behind."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    group: str
    """The group's name in the store, never used again."""
    rank: int
    size: int
    device: torch.device
    backend: Backend


OnReceived = Callable[[int], None]
"""Called with the number of bytes of a parcel received so far, in order: they are verified while the next are in flight."""


class Link:
    """A process group with a deadline on every operation, whose failures are raised as WireError."""

    def __init__(self, group: Any, place: GroupPlace, wire: WireConfig, abandoned: Event) -> None:
        self._group = group
        self._place = place
        self._operation_s = wire.operation_timeout_s
        self.abandoned = abandoned
        """Set once no caller waits for the result; pending NCCL operations then fail at once."""
        self.bytes_per_s = 0.0
        """Speed of the last whole parcel; 0 before the first."""
        self._under_way: dict[int, tuple[Work, torch.Tensor]] = {}
        """Operations that have begun, by identity: NCCL uses their tensors until they are complete or the group is aborted."""

    @classmethod
    def open(cls, rendezvous: WireRendezvous, place: GroupPlace, wire: WireConfig, abandoned: Event) -> Link:
        with as_wire_error("rendezvous"), many_descriptors():
            _wait_for_members(rendezvous, place, wire)
            group = _nccl(rendezvous, place, wire) if place.backend == "nccl" else _gloo(rendezvous, place, wire)
        link = cls(group, place, wire, abandoned)
        if place.backend == "nccl":  # it builds its communicator at the first operation
            try:
                link.wait(link.begin_barrier(wire.rendezvous_timeout_s), wire.rendezvous_timeout_s)
            except WireError:
                link.abort()
                raise
        return link

    def share(self, data: torch.Tensor) -> torch.Tensor:
        """Broadcast host memory of rank 0 and return it; blocks. The other ranks give a tensor of the same size and dtype."""
        carried = data.to(self._place.device) if self._place.backend == "nccl" else data
        self.wait(self.broadcast(carried))
        return carried.cpu()

    def broadcast(self, data: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._operation_s)
        with as_wire_error("broadcast"):
            return self._begun(self._group.broadcast([data], options), data)

    def wait(self, work: Work, within_s: float | None = None) -> None:
        with as_wire_error("transfer"):
            if self._place.backend == "nccl":
                self._wait_on_host(work, within_s if within_s is not None else self._operation_s)
            work.wait()
        del self._under_way[id(work)]

    def begin_barrier(self, within_s: float | None = None) -> Work:
        """Start an all-reduce that completes once every rank has called this."""
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=within_s if within_s is not None else self._operation_s)
        where = self._place.device if self._place.backend == "nccl" else "cpu"
        ticks = torch.zeros(1, dtype=torch.int32, device=where)
        with as_wire_error("all-reduce"):
            return self._begun(self._group.allreduce([ticks], options), ticks)

    def abort(self, within_s: float = _ABORT_S) -> None:
        """End the group and the operations under way. Returns after `within_s` at the latest, and raises nothing."""
        # Stopping NCCL's kernels may take long. Meanwhile the thread keeps this link, and with it the tensors that they use.
        wait([start_daemon_thread(self._abort, name="weight-abort")], within_s)

    def close(self) -> None:
        """End an idle group. Raises WireError when that fails; then no thread of this process uses it either."""
        if self._place.backend == "nccl":  # its shutdown would wait for members that may be dead
            self.abort()
            return
        with as_wire_error("a process group cannot be closed"):
            self._group.shutdown()

    def _begun(self, work: Work, data: torch.Tensor) -> Work:
        self._under_way[id(work)] = work, data
        return work

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            _log.warning("a process group could not be aborted", group=self._place.group, reason=str(error).partition("\n")[0])

    def _wait_on_host(self, work: Work, within_s: float) -> None:
        # NCCL's wait() returns once the operation is queued; only the host can give up on one that never ends.
        deadline = time.monotonic() + within_s
        while not work.is_completed():
            if self.abandoned.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"not complete after {within_s:g} s")
            time.sleep(0.0005)


class LinkPool:
    """One end's links, kept from version to version while their groups keep their members."""

    def __init__(self, wire: WireConfig) -> None:
        self._wire = wire
        self._idle: dict[str, Link] = {}

    @contextmanager
    def use(self, rendezvous: WireRendezvous, place: GroupPlace, abandoned: Event) -> Generator[Link]:
        """An idle link of that group, or a new one. An exception inside the context aborts the link."""
        link = self._idle.pop(place.group, None)
        if link is None:
            link = Link.open(rendezvous, place, self._wire, abandoned)
        link.abandoned = abandoned
        try:
            yield link
        except BaseException:
            link.abort()
            raise
        self._idle[place.group] = link

    def keep_only(self, groups: Collection[str]) -> None:
        for name in self._idle.keys() - set(groups):
            try:
                self._idle.pop(name).close()
            except WireError as error:  # the group is not used again in any case
                _log.info("a process group was left behind", group=name, reason=str(error))

    def close(self) -> None:
        self.keep_only(())


def broadcast_whole(link: Link, data: torch.Tensor, transfer_bytes: int, on_received: OnReceived = lambda _: None) -> None:
    """Rank 0 sends `data`, the others receive it."""
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
        on_received(stop)  # with the pipeline full
    while under_way:
        on_received(stop)
        stop = finish_oldest()
    barrier = link.begin_barrier()  # no end closes the group while another still receives
    on_received(stop)
    link.wait(barrier)


def _wait_for_members(rendezvous: WireRendezvous, place: GroupPlace, wire: WireConfig) -> None:
    # Building an NCCL group may take long and cannot be interrupted, so first check that all members are present.
    rendezvous.store.set(f"{place.group}/here/{place.rank}", "")
    present = [f"{place.group}/here/{rank}" for rank in range(place.size)]
    rendezvous.store.wait(present, timedelta(seconds=wire.operation_timeout_s))


def _gloo(rendezvous: WireRendezvous, place: GroupPlace, wire: WireConfig) -> ProcessGroupGloo:
    store = PrefixStore(place.group, rendezvous.store)
    # All members are present, so connecting them takes milliseconds.
    timeout = timedelta(seconds=wire.operation_timeout_s)
    connections = _DEPTH if place.size <= _SMALL else 1
    building = start_daemon_thread(
        lambda: gloo.connect(
            store, place.rank, place.size, host=rendezvous.address, timeout=timeout, connections=connections, threads=_DEPTH
        ),
        name="weight-group",
    )
    try:
        # Bounds the whole build: gloo applies its timeout to each of several tries. A thread that is still trying is abandoned.
        return building.result(wire.operation_timeout_s)
    except TimeoutError:
        raise RuntimeError(f"the group was not connected within {wire.operation_timeout_s:g} s") from None


def _nccl(rendezvous: WireRendezvous, place: GroupPlace, wire: WireConfig) -> Any:
    timeout = timedelta(seconds=wire.rendezvous_timeout_s)
    return nccl.connect(rendezvous, place.group, place.rank, place.size, device=place.device, timeout=timeout)
