"""Both ends' data movement over a torch process group of its own: NCCL where everybody has a GPU to himself, else gloo.

    sender                                  receivers
    Meeting.open(host) ── address, offer ─▶ Meeting.join(address)      the store where ranks find each other
    link(..., rank=0) ◀── rendezvous ─────▶ link(..., rank=1..n)       the process group
    send_weights      ─── broadcasts ─────▶ receive_weights            ends with an all-reduce: everybody has everything

A link is used for one attempt. After any failure the group is poison: it is aborted, and the next attempt meets in a store
of its own. The groups are built directly, never registered: the process's default group is somebody else's.
Everything here blocks; it is called on a thread.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where torch's own type stubs have them
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, Work

from async_rl.errors import WireError
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.digest import WeightsDigest, bytes_of
from async_rl.transport.messages import Backend
from async_rl.transport.plan import Transfer
from async_rl.transport.staging import Staging

_DEPTH = 2
"""Transfers under way at once: while one is on the wire, the next is packed, or the last one hashed."""

_WATCHDOG = timedelta(days=1)
"""NCCL's own watchdog takes the whole process down when it fires; our deadlines are shorter and abort only the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    rendezvous_s: float
    operation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One end's place in an attempt's group."""

    rank: int
    size: int
    device: torch.device
    backend: Backend
    timeouts: Timeouts
    released: Event
    """Set when nobody waits for this end any more."""


class Meeting:
    """The store of one attempt. Closing the sender's end frees everybody who still waits in a rendezvous."""

    def __init__(self, host: str, port: int, server: TCPStore | None, wait_s: float) -> None:
        self.host = host
        self.port = port
        self._server = server
        with _as_wire_error(f"cannot reach the learner's store at {host}:{port}"):
            self.store = TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=wait_s))

    @classmethod
    def open(cls, host: str, wait_s: float) -> Meeting:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, 0), family=family)  # bound to `host` alone, not to every interface
        except OSError as error:
            raise WireError(
                f"wire.host: cannot listen at {host!r} ({error}); give an address of the learner's machine"
            ) from error
        port: int = listening.getsockname()[1]
        server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return cls(host, port, server, wait_s)

    @classmethod
    def join(cls, host: str, port: int, wait_s: float) -> Meeting:
        return cls(host, port, None, wait_s)

    def close(self) -> None:
        self._server = None

    def write_manifest(self, specs: Sequence[ParameterSpec]) -> None:
        self.store.set("manifest", json.dumps([asdict(spec) for spec in specs]))

    def read_manifest(self) -> list[ParameterSpec]:
        with _as_wire_error("cannot read the learner's parameter table"):
            rows = json.loads(self.store.get("manifest"))
        return [ParameterSpec(name=row["name"], shape=tuple(row["shape"]), dtype=row["dtype"]) for row in rows]


class Link:
    """A process group that turns whatever torch raises into WireError, with a deadline on every operation."""

    def __init__(self, group: Any, seat: Seat) -> None:
        self._group = group
        self._seat = seat

    def broadcast(self, data: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._seat.timeouts.operation_s)
        with _as_wire_error("broadcast"):
            return self._group.broadcast([data], options)

    def wait(self, work: Work, within_s: float | None = None) -> None:
        with _as_wire_error("transfer"):
            if self._seat.backend == "nccl":
                self._wait_on_host(work, within_s if within_s is not None else self._seat.timeouts.operation_s)
            work.wait()

    def finish(self) -> None:
        """Return once every rank has everything: nobody tears down a group that another still receives from."""
        self.agree(self._seat.timeouts.operation_s)

    def agree(self, within_s: float) -> None:
        """Return once every rank has come here."""
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=within_s)
        where = self._seat.device if self._seat.backend == "nccl" else "cpu"
        with _as_wire_error("all-reduce"):
            work = self._group.allreduce([torch.zeros(1, dtype=torch.int32, device=where)], options)
        self.wait(work, within_s)

    def _wait_on_host(self, work: Work, within_s: float) -> None:
        # NCCL's wait() returns once the operation is queued; only the host can give up on one that never ends.
        deadline = time.monotonic() + within_s
        while not work.is_completed():
            if self._seat.released.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"not complete after {within_s:g} s")
            time.sleep(0.0005)


@contextmanager
def link(meeting: Meeting, seat: Seat) -> Iterator[Link]:
    """Meet the other ranks, then hold the group until the block ends."""
    with _as_wire_error("rendezvous"):
        _call_the_roll(meeting.store, seat)
        group = _nccl(meeting.store, seat) if seat.backend == "nccl" else _gloo(meeting, seat)
    try:
        wire = Link(group, seat)
        if seat.backend == "nccl":  # it builds its communicator at the first operation
            wire.agree(seat.timeouts.rendezvous_s)
        yield wire
    except BaseException:
        group.abort()
        raise
    group.shutdown()


def _call_the_roll(store: TCPStore, seat: Seat) -> None:
    # Building a group may rightly take long (NCCL) and cannot be interrupted: so first see, quickly, that everybody is there.
    store.set(f"here/{seat.rank}", "")
    store.wait([f"here/{rank}" for rank in range(seat.size)], timedelta(seconds=seat.timeouts.operation_s))


def send_weights(link: Link, transfers: Sequence[Transfer], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    widest = max((transfer.num_bytes for transfer in transfers if transfer.is_packed), default=0)
    lanes = [torch.zeros(widest, dtype=torch.uint8, device=device) for _ in range(_DEPTH)]
    under_way: deque[Work] = deque()
    for number, transfer in enumerate(transfers):
        if len(under_way) == _DEPTH:  # the oldest has left this transfer's lane once it is complete
            link.wait(under_way.popleft())
        under_way.append(link.broadcast(_outgoing(transfer, tensors, lanes[number % _DEPTH])))
    for work in under_way:
        link.wait(work)
    link.finish()


def _outgoing(transfer: Transfer, tensors: Mapping[str, torch.Tensor], lane: torch.Tensor) -> torch.Tensor:
    if not transfer.is_packed:
        (piece,) = transfer.pieces
        return bytes_of(tensors[piece.name])[piece.start : piece.stop]
    for piece in transfer.pieces:
        lane[piece.offset : piece.offset + piece.num_bytes].copy_(bytes_of(tensors[piece.name]))
    return lane[: transfer.num_bytes]


def receive_weights(link: Link, transfers: Sequence[Transfer], staging: Staging) -> str:
    """Fill the staging buffers; returns the digest of what arrived."""
    digest = WeightsDigest(staging.specs)
    under_way: deque[tuple[Work, Transfer]] = deque()

    def land_oldest() -> None:
        work, transfer = under_way.popleft()
        link.wait(work)
        for piece in transfer.pieces:
            digest.update(piece.name, staging.piece(piece))

    for transfer in transfers:
        if len(under_way) == _DEPTH:
            land_oldest()
        under_way.append((link.broadcast(staging.row(transfer)), transfer))
    while under_way:
        land_oldest()
    link.finish()
    return digest.hexdigest()


def _gloo(meeting: Meeting, seat: Seat) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    # Everybody answered the roll call, so the mesh is a matter of milliseconds; and closing the store does not end this wait.
    options._timeout = timedelta(seconds=seat.timeouts.operation_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
    options._threads = _DEPTH
    return ProcessGroupGloo(PrefixStore("gloo", meeting.store), seat.rank, seat.size, options)


def _nccl(store: TCPStore, seat: Seat) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds of torch

    torch.cuda.set_device(seat.device)  # the current device belongs to the thread
    options = ProcessGroupNCCL.Options()
    options._timeout = _WATCHDOG
    options.config.blocking = 0
    return ProcessGroupNCCL(PrefixStore("nccl", store), seat.rank, seat.size, options)


def _own_address(meeting: Meeting) -> str:
    """The address of the interface that leads to the sender: gloo would otherwise trust this machine's host name."""
    family, kind, protocol, _, address = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


@contextmanager
def _as_wire_error(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise WireError(f"{doing}: {str(error).partition(chr(10))[0]}") from error
