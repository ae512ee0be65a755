"""Receives the parcels of a version: those in memory of the same machine are read in place, the others are fetched.

Everything here blocks; call it on threads. Buffers of a failed attempt are never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import cpu_count
from threading import Event

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import WireConfig
from async_rl.errors import FleetMismatch, WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.supervision.liveness.daemon_thread import start_daemon_thread
from async_rl.transport.delta.parcel_delta import DeltaPiece, split_parcel
from async_rl.transport.digest import chunk_digest, chunks_of, version_digest
from async_rl.transport.gpu_stream import on_host, transport_stream
from async_rl.transport.messages import PushBegin
from async_rl.transport.packed_source import PackedParcel, PackedSource
from async_rl.transport.parcel_transfer import has_deltas, receive_parcel
from async_rl.transport.plan import CHUNK_BYTES, WireLayout, describe_mismatch
from async_rl.transport.receiving.placement import Placement
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.wire.gpus import takes_turns
from async_rl.transport.wire.process_group import GroupPlace, LinkPool, OnReceived
from async_rl.transport.wire.rendezvous import WireRendezvous, as_wire_error
from async_rl.transport.wire.shared_memory import MappedMemories, MappedMemory, ParcelMemory
from async_rl.types import VersionRecord

_READERS = min(4, cpu_count())
"""Threads that verify parcels read in place: one thread uses half of the memory's bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedVersion:
    """A version to be received: its digests, and its parcels in memory of this machine."""

    record: VersionRecord
    layout: WireLayout
    packed: tuple[PackedParcel, ...]
    mapped: Mapping[int, MappedMemory]
    """Parcels in the sender's memory, locked against being overwritten until `unlock`."""

    def unlock(self) -> None:
        for memory in self.mapped.values():
            memory.unlock()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedVersion:
    """A version that was received completely and verified."""

    expected: ExpectedVersion
    weights: ReceivedWeights
    own: dict[int, ParcelMemory]
    """The parcels in this process' own memory."""


FetchParcel = Callable[[int, torch.Tensor, OnReceived], None]
"""Fetches the parcel of a number into a tensor, and reports progress. Raises WireError."""


@dataclass(slots=True, eq=False)
class _KnownLearner:
    """State kept between the versions of one learner."""

    fence: int
    rendezvous: WireRendezvous
    layout: WireLayout
    links: LinkPool
    pieces: Sequence[Sequence[DeltaPiece]]
    """Each parcel as deltas divide it."""
    mapped: MappedMemories


class ParcelReceiver:
    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        placement: Placement,
        wire: WireConfig,
        store: Store,
    ) -> None:
        """`specs`: the parameters as sent. `store`: for the rendezvous of process groups."""
        self._specs = tuple(specs)
        self._store = store
        self._placement = placement
        self._wire = wire
        self._learner: _KnownLearner | None = None
        self._buffers: dict[int, ParcelMemory] = {}
        """Memory for parcels, by number, that no thread writes to or reads from."""
        self._held: VersionRecord | None = None
        """The version whose unchanged parcels are in `_buffers`; None: unknown content."""

    def check_model(self, layout: WireLayout) -> None:
        """Raise FleetMismatch when the learner trains another model."""
        if reason := describe_mismatch(layout.specs, self._specs):
            raise FleetMismatch(
                f"this worker's model is not the learner's: {reason}; start both with the same `model:` section"
            )

    def expect_from_learner(self, record: VersionRecord, source: PackedSource) -> ExpectedVersion:
        """A version that the learner has packed. Raises WireError when it has not, FleetMismatch for another model."""
        learner = self._connect(source)
        packed = source.versions.get(record.version)
        if packed is None:
            raise WireError(f"it has not packed version {record.version}")
        _check_digest(record, learner.layout, packed)
        return ExpectedVersion(record=record, layout=learner.layout, packed=packed, mapped=self._map(learner, packed))

    def expect_from_snapshot(
        self, record: VersionRecord, layout: WireLayout, packed: tuple[PackedParcel, ...]
    ) -> ExpectedVersion:
        """A version that is described by a snapshot. The description need not be trusted: it must match the record's digest."""
        self.check_model(layout)
        _check_digest(record, layout, packed)
        return ExpectedVersion(record=record, layout=layout, packed=packed, mapped={})

    @property
    def holds(self) -> str:
        """Digest of the version to which this end can apply a delta; empty: none."""
        learner, held = self._learner, self._held
        if learner is None or held is None:
            return ""
        return held.digest if any(has_deltas(learner.pieces[number]) for number in self._buffers) else ""

    def receive(self, expected: ExpectedVersion, begin: PushBegin, member: str, abandoned: Event) -> ReceivedVersion:
        """Receive the parcels over process groups. Raises WireError when a transfer fails or a digest does not match."""
        assert self._learner is not None
        learner = self._learner
        learner.links.keep_only([group.group for group in begin.groups])
        groups = {group.parcel: group for group in begin.groups if member in group.members}
        with_base = set(self._buffers) if self._held is not None else set[int]()

        def fetch_parcel(number: int, data: torch.Tensor, on_received: OnReceived) -> None:
            group = groups[number]
            place = GroupPlace(
                group=group.group,
                rank=group.members.index(member) + 1,
                size=len(group.members) + 1,
                device=self._placement.device_of(number),
                backend=begin.backend,
            )
            with learner.links.use(learner.rendezvous, place, abandoned) as link:
                receive_parcel(
                    link,
                    data,
                    learner.pieces[number],
                    may_be_delta=group.base >= 0,
                    holds_base=number in with_base,
                    transfer_bytes=begin.transfer_bytes,
                    on_received=on_received,
                )

        return self.fetch(expected, fetch_parcel, in_turn=takes_turns(begin.backend))

    def fetch(self, expected: ExpectedVersion, fetch_parcel: FetchParcel, *, in_turn: bool = False) -> ReceivedVersion:
        """Receive all parcels, verifying each as it arrives. `fetch_parcel` fetches those not read in place: concurrently, or
        (over NCCL) one after the other by number.

        Raises WireError.
        """
        self._held = None
        own: dict[int, ParcelMemory] = {}
        work: list[Callable[[], None]] = []
        fetches: list[Callable[[], None]] = []
        readers = max(1, _READERS // max(1, len(expected.mapped)))
        for number in range(len(expected.packed)):
            if number in expected.mapped:
                data = expected.mapped[number].data
                if data.device.type == "cpu":  # a GPU's memory is the very memory whose digests were computed
                    check = _ChunkVerifier(expected, number, data)
                    work += [partial(check.verify_share, first, readers) for first in range(readers)]
            else:
                device = self._placement.device_of(number) if in_turn else self._placement.memory_of(number)
                own[number] = self._memory(number, expected.layout, device)
                data = own[number].data
                check = _ChunkVerifier(expected, number, data)
                fetches.append(partial(_fetch, fetch_parcel, number, data, check.verify_up_to))
        work += [partial(_do_all, fetches)] if in_turn else fetches
        # Daemon threads do not keep the process alive while they hang. A failure is raised once all have ended.
        running = [start_daemon_thread(one, name="weight-parcel") for one in work]
        wait(running)
        for each in running:
            each.result()
        held = {**own, **expected.mapped}
        memories = [held[number] for number in range(len(expected.packed))]
        weights = ReceivedWeights(expected.layout, [memory.data for memory in memories], memories=memories)
        return ReceivedVersion(expected=expected, weights=weights, own=own)

    def recycle(self, received: ReceivedVersion) -> None:
        """Return a version's memory once its weights are not read any more."""
        received.expected.unlock()
        layout = self._learner.layout if self._learner is not None else None
        is_alike = layout is not None and layout.digest == received.expected.layout.digest
        # A version that another learner packed has other parcels.
        self._buffers, self._held = (dict(received.own), received.expected.record) if is_alike else ({}, None)

    def free(self) -> None:
        """Give up the memory that it keeps for the next version."""
        self._buffers, self._held = {}, None

    def close(self) -> None:
        if self._learner is not None:
            self._learner.links.close()

    def _connect(self, source: PackedSource) -> _KnownLearner:
        known = self._learner
        if known is not None and known.fence == source.fence:
            return known
        self.check_model(source.layout)
        rendezvous = WireRendezvous.facing(source.host, self._store)
        self.close()
        self.free()
        self._learner = _KnownLearner(
            fence=source.fence,
            rendezvous=rendezvous,
            layout=source.layout,
            links=LinkPool(self._wire),
            pieces=[split_parcel(source.layout, parcel, source.deltas) for parcel in source.layout.parcels],
            mapped=MappedMemories(self._placement.devices),
        )
        return self._learner

    def _map(self, learner: _KnownLearner, packed: Sequence[PackedParcel]) -> dict[int, MappedMemory]:
        mapped: dict[int, MappedMemory] = {}
        for number, (parcel, each) in enumerate(zip(learner.layout.parcels, packed, strict=True)):
            memory = learner.mapped.open(each.address, parcel.num_bytes)
            if memory is not None and memory.lock_shared():
                mapped[number] = memory
        learner.mapped.drop_ended()
        return mapped

    def _memory(self, number: int, layout: WireLayout, device: torch.device) -> ParcelMemory:
        num_bytes = layout.parcels[number].num_bytes
        spare = self._buffers.pop(number, None)
        if spare is not None and len(spare.data) == num_bytes and spare.data.device.type == device.type:
            return spare  # others are from another learner, with other parcels
        no_room = f"{device} has no room for parcel {number} ({num_bytes / 2**30:.2f} GB)"
        # Not only its memory may be short: a GPU may have no room for this process' context, or the process no descriptor left.
        with as_wire_error(no_room), transport_stream(device):  # to whose memory it returns
            memory = ParcelMemory(num_bytes, device, shared=self._placement.is_shared)
        if self._placement.is_shared and device.type == "cpu" and not memory.address:
            raise WireError(f"{no_room} that other processes of the worker can open")
        return memory


def _fetch(fetch_parcel: FetchParcel, number: int, data: torch.Tensor, on_received: OnReceived) -> None:
    with as_wire_error(f"cannot receive parcel {number}"), transport_stream(data.device):
        fetch_parcel(number, data, on_received)


def _do_all(work: Sequence[Callable[[], None]]) -> None:
    for one in work:
        one()


def _check_digest(record: VersionRecord, layout: WireLayout, packed: Sequence[PackedParcel]) -> None:
    if [len(each.chunks) for each in packed] != [parcel.num_chunks for parcel in layout.parcels]:
        raise WireError(f"version {record.version} is described with more or fewer chunks than it has")
    if (found := version_digest(layout.digest, [each.chunks for each in packed])) != record.digest:
        raise WireError(f"the parcels of version {record.version} add up to {found}, not to {record.digest}")


class _ChunkVerifier:
    def __init__(self, expected: ExpectedVersion, number: int, data: torch.Tensor) -> None:
        self._chunks = expected.packed[number].chunks
        self._what = f"parcel {number} of version {expected.record.version}"
        self._data = data
        self._checked = 0

    def verify_up_to(self, arrived: int) -> None:
        first = self._checked
        self._checked = arrived // CHUNK_BYTES if arrived < len(self._data) else len(self._chunks)
        self._verify(range(first, self._checked))

    def verify_share(self, first: int, readers: int) -> None:
        """Verify every `readers`-th chunk of a complete parcel."""
        self._verify(range(first, len(self._chunks), readers))

    def _verify(self, numbers: range) -> None:
        for number, chunk in zip(numbers, on_host(chunks_of(self._data, numbers)), strict=True):
            if (found := chunk_digest(chunk)) != (packed := self._chunks[number]):
                raise WireError(f"chunk {number} of {self._what} has digest {found}, packed was {packed}")
