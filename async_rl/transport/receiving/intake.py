"""How a worker takes a version in: what lies on its own machine is read in place, the rest is fetched.

Everything here blocks; it is called on threads. What a broken attempt left half done is never used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import cpu_count
from threading import Event

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import FleetMismatch, WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.delta.difference import DeltaPiece, pieces
from async_rl.transport.digest import chunk_digest, version_digest
from async_rl.transport.messages import PushBegin
from async_rl.transport.packed_source import PackedParcel, PackedSource
from async_rl.transport.parcel_transfer import DELTA_COMPILER, can_differ, receive
from async_rl.transport.plan import CHUNK_BYTES, WireLayout, model_difference
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.wire.process_group import GroupRank, LinkPool, OnReceived, WireTimeouts
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.transport.wire.shared_memory import MappedMemory
from async_rl.types import VersionRecord

_READERS = min(4, cpu_count())
"""Threads that verify what lies on this machine: one reads at half the speed of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedVersion:
    """What a version must be, and where some of it lies already."""

    record: VersionRecord
    layout: WireLayout
    packed: tuple[PackedParcel, ...]
    mapped: Mapping[int, MappedMemory]
    """Parcels in their sender's memory, held so that they stay as they are."""

    def let_go(self) -> None:
        for memory in self.mapped.values():
            memory.let_go()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedVersion:
    """A version that is here, whole and verified."""

    expected: ExpectedVersion
    weights: ReceivedWeights
    own: dict[int, torch.Tensor]
    """The parcels that lie in this process' own memory."""


FetchParcel = Callable[[int, torch.Tensor, OnReceived], None]
"""Brings a parcel, given its number, into memory of ours. Raises WireError."""


@dataclass(slots=True, eq=False)
class _Sender:
    """What is remembered of a learner between versions."""

    fence: int
    meeting: WireRendezvous
    layout: WireLayout
    links: LinkPool
    mapped: dict[str, MappedMemory] = field(default_factory=dict[str, MappedMemory])
    _cuts: dict[int, tuple[DeltaPiece, ...]] = field(default_factory=dict[int, tuple[DeltaPiece, ...]])

    def cut(self, number: int) -> tuple[DeltaPiece, ...]:
        if number not in self._cuts:
            self._cuts[number] = pieces(self.layout, self.layout.parcels[number])
        return self._cuts[number]


class ParcelReceiver:
    def __init__(self, specs: Sequence[ParameterSpec], device: torch.device, timeouts: WireTimeouts, store: Store) -> None:
        """`store`: where process groups meet."""
        self._specs = tuple(specs)
        self._store = store
        self._device = device
        self._timeouts = timeouts
        self._sender: _Sender | None = None
        self._spare: dict[int, torch.Tensor] = {}
        """Memory for parcels that no thread writes to and nobody reads."""
        self._held: VersionRecord | None = None
        """Whose parcels these are, as they arrived."""

    def meet(self, source: PackedSource) -> None:
        """Raises FleetMismatch when the learner trains another model."""
        self._met(source)

    def expect(self, record: VersionRecord, source: PackedSource) -> ExpectedVersion:
        """What the learner says of a version that it packed. Raises FleetMismatch as `meet` does."""
        sender = self._met(source)
        packed = source.versions.get(record.version)
        if packed is None:
            raise WireError(f"it has not packed version {record.version}")
        _raise_unless_it_is(record, sender.layout, packed)
        return ExpectedVersion(record=record, layout=sender.layout, packed=packed, mapped=self._map(sender, packed))

    def expect_as_told(self, record: VersionRecord, layout: WireLayout, packed: tuple[PackedParcel, ...]) -> ExpectedVersion:
        """As `expect`, no matter by whom it is told: only the truth has the record's digest."""
        self._raise_if_another(layout)
        _raise_unless_it_is(record, layout, packed)
        return ExpectedVersion(record=record, layout=layout, packed=packed, mapped={})

    @property
    def holds(self) -> str:
        """The digest of a version to which this end can take a difference; empty if there is none."""
        sender, held = self._sender, self._held
        if sender is None or held is None or self._device.type != "cpu":
            return ""
        if not any(can_differ(sender.cut(number)) for number in self._spare) or not DELTA_COMPILER.is_there:
            return ""
        return held.digest

    def receive(self, expected: ExpectedVersion, begin: PushBegin, member: str, released: Event) -> ReceivedVersion:
        """Raises WireError when anything breaks or is not what was packed."""
        assert self._sender is not None
        sender = self._sender
        sender.links.keep_only([wire.group for wire in begin.wires])
        wires = {wire.parcel: wire for wire in begin.wires if member in wire.members}
        based = set(self._spare) if self._held is not None else set()

        def take(number: int, data: torch.Tensor, landed: OnReceived) -> None:
            wire = wires[number]
            seat = GroupRank(
                group=wire.group,
                rank=wire.members.index(member) + 1,
                size=len(wire.members) + 1,
                device=self._device,
                backend=begin.backend,
            )
            with sender.links.use(sender.meeting, seat, released) as link:
                receive(
                    link,
                    data,
                    sender.cut(number),
                    may_differ=wire.base >= 0,
                    holds_base=number in based,
                    transfer_bytes=begin.transfer_bytes,
                    landed=landed,
                )

        return self.fetch(expected, take)

    def fetch(self, expected: ExpectedVersion, take: FetchParcel) -> ReceivedVersion:
        """Every parcel at once, each verified as it comes; `take` brings those that are not read in place."""
        self._held = None
        own: dict[int, torch.Tensor] = {}
        work: list[Callable[[], None]] = []
        readers = max(1, _READERS // max(1, len(expected.mapped)))
        for number in range(len(expected.packed)):
            if number in expected.mapped:
                data = expected.mapped[number].data
                work += [partial(_Check(expected, number, data).share, first, readers) for first in range(readers)]
            else:
                data = own[number] = self._memory(number, expected.layout)
                check = _Check(expected, number, data)
                work.append(lambda number=number, data=data, check=check: take(number, data, check.up_to))
        _together(work)
        parcels = [own[number] if number in own else expected.mapped[number].data for number in range(len(expected.packed))]
        return ReceivedVersion(expected=expected, weights=ReceivedWeights(expected.layout, parcels), own=own)

    def recycle(self, landing: ReceivedVersion) -> None:
        """Nobody reads it any more."""
        landing.expected.let_go()
        self._spare = dict(landing.own)
        self._held = landing.expected.record

    def close(self) -> None:
        if self._sender is not None:
            self._sender.links.close()

    def _met(self, source: PackedSource) -> _Sender:
        known = self._sender
        if known is not None and known.fence == source.fence:
            return known
        self._raise_if_another(source.layout)
        meeting = WireRendezvous.towards(source.host, self._store)
        self.close()
        self._spare.clear()
        self._held = None
        self._sender = _Sender(fence=source.fence, meeting=meeting, layout=source.layout, links=LinkPool(self._timeouts))
        return self._sender

    def _raise_if_another(self, layout: WireLayout) -> None:
        if reason := model_difference(layout.specs, self._specs):
            raise FleetMismatch(reason)

    def _map(self, sender: _Sender, packed: Sequence[PackedParcel]) -> dict[int, MappedMemory]:
        mapped: dict[int, MappedMemory] = {}
        for number, (parcel, each) in enumerate(zip(sender.layout.parcels, packed, strict=True)):
            memory = sender.mapped.get(each.address)
            if memory is None or not memory.is_current:
                memory = MappedMemory.open(each.address, parcel.num_bytes, self._device) if each.address else None
            if memory is not None and memory.hold():
                mapped[number] = memory
        # Those of versions before this one are likely to come again: senders take turns with their memories.
        sender.mapped |= {memory.address: memory for memory in mapped.values()}
        sender.mapped = {address: memory for address, memory in sender.mapped.items() if memory.is_current}
        return mapped

    def _memory(self, number: int, layout: WireLayout) -> torch.Tensor:
        num_bytes = layout.parcels[number].num_bytes
        spare = self._spare.pop(number, None)
        if spare is not None and len(spare) == num_bytes:  # one from before may be of another learner's parcel
            return spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _raise_unless_it_is(record: VersionRecord, layout: WireLayout, packed: Sequence[PackedParcel]) -> None:
    if [len(each.chunks) for each in packed] != [parcel.num_chunks for parcel in layout.parcels]:
        raise WireError(f"version {record.version} is described with more or fewer chunks than it has")
    if (found := version_digest(layout.digest, [each.chunks for each in packed])) != record.digest:
        raise WireError(f"the parcels of version {record.version} add up to {found}, not to {record.digest}")


class _Check:
    """Of a parcel, chunk by chunk, as far as it has arrived."""

    def __init__(self, expected: ExpectedVersion, number: int, data: torch.Tensor) -> None:
        self._chunks = expected.packed[number].chunks
        self._what = f"parcel {number} of version {expected.record.version}"
        self._data = data
        self._checked = 0

    def up_to(self, arrived: int) -> None:
        while self._checked < len(self._chunks) and min((self._checked + 1) * CHUNK_BYTES, len(self._data)) <= arrived:
            self._look_at(self._checked)
            self._checked += 1

    def share(self, first: int, readers: int) -> None:
        """One reader's, of what is there already."""
        for number in range(first, len(self._chunks), readers):
            self._look_at(number)

    def _look_at(self, number: int) -> None:
        found, packed = chunk_digest(self._data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]), self._chunks[number]
        if found != packed:
            raise WireError(f"chunk {number} of {self._what} has digest {found}, packed was {packed}")


def _together(work: Sequence[Callable[[], None]]) -> None:
    """On threads that nothing waits for at the end of the process: some may hang until their time is up."""
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=run, args=(one,), name="weight-parcel", daemon=True) for one in work[1:]]
    for thread in others:
        thread.start()
    for one in work[:1]:
        run(one)
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
