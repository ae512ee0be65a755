"""How a worker takes a version in: what lies on its own machine is read in place, the rest comes over process groups.

Everything here blocks; it is called on threads. What a broken attempt left half done is never used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

import torch

from async_rl.errors import FleetMismatch, WireError
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.digest import chunk_digest, version_digest
from async_rl.transport.landing import LandedWeights
from async_rl.transport.link import Links, Seat, Timeouts, receive_parcel
from async_rl.transport.meeting import Meeting, Packed
from async_rl.transport.memory import MappedMemory
from async_rl.transport.messages import Begin, Offer
from async_rl.transport.plan import CHUNK_BYTES, Layout, model_difference
from async_rl.types import VersionRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """What a version must be, and where some of it lies already."""

    record: VersionRecord
    meeting: Meeting
    layout: Layout
    packed: tuple[Packed, ...]
    mapped: Mapping[int, MappedMemory]
    """Parcels in their sender's memory, held so that they stay as they are."""

    def let_go(self) -> None:
        for memory in self.mapped.values():
            memory.let_go()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landing:
    """A version that is here, whole and verified."""

    expected: Expected
    weights: LandedWeights
    own: dict[int, torch.Tensor]
    """The parcels that lie in this process' own memory."""


@dataclass(slots=True, eq=False)
class _Sender:
    """What is remembered of a learner between versions."""

    meeting: Meeting
    layout: Layout
    links: Links
    mapped: dict[str, MappedMemory] = field(default_factory=dict[str, MappedMemory])


class Intake:
    def __init__(self, specs: Sequence[ParameterSpec], device: torch.device, timeouts: Timeouts) -> None:
        self._specs = tuple(specs)
        self._device = device
        self._timeouts = timeouts
        self._sender: _Sender | None = None
        self._spare: dict[int, torch.Tensor] = {}
        """Memory for parcels that no thread writes to and nobody reads."""

    def expect(self, offer: Offer) -> Expected:
        """Raises FleetMismatch when the learner trains another model."""
        sender = self._met(offer)
        packed = sender.meeting.packed(offer.record.version, len(sender.layout.parcels))
        if (found := version_digest(offer.layout, [each.chunks for each in packed])) != offer.record.digest:
            raise WireError(f"the parcels of version {offer.record.version} add up to {found}, not to {offer.record.digest}")
        mapped = self._map(sender, packed)
        return Expected(record=offer.record, meeting=sender.meeting, layout=sender.layout, packed=packed, mapped=mapped)

    def receive(self, expected: Expected, begin: Begin, member: str, released: Event) -> Landing:
        """Raises WireError when anything breaks or is not what was packed."""
        assert self._sender is not None
        links = self._sender.links
        links.keep_only([wire.group for wire in begin.wires])
        own: dict[int, torch.Tensor] = {}
        work: list[Callable[[], None]] = []
        for number, memory in expected.mapped.items():
            work.append(lambda number=number, memory=memory: _Check(expected, number, memory.data).up_to(len(memory.data)))
        for wire in begin.wires:
            if member not in wire.members:
                continue
            own[wire.parcel] = self._memory(wire.parcel, expected.layout)
            seat = Seat(
                group=wire.group,
                rank=wire.members.index(member) + 1,
                size=len(wire.members) + 1,
                device=self._device,
                backend=begin.backend,
            )

            def take(number: int = wire.parcel, seat: Seat = seat) -> None:
                check = _Check(expected, number, own[number])
                with links.use(expected.meeting, seat, released) as link:
                    receive_parcel(link, own[number], begin.transfer_bytes, check.up_to)

            work.append(take)
        _together(work)
        parcels = [own[number] if number in own else expected.mapped[number].data for number in range(len(expected.packed))]
        return Landing(expected=expected, weights=LandedWeights(expected.layout, parcels), own=own)

    def recycle(self, landing: Landing) -> None:
        """Nobody reads it any more."""
        landing.expected.let_go()
        self._spare.update(landing.own)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.links.close()

    def _met(self, offer: Offer) -> _Sender:
        known = self._sender
        if known is not None and (known.meeting.host, known.meeting.port) == (offer.host, offer.port):
            return known
        meeting = Meeting.join(offer.host, offer.port, self._timeouts.operation_s)
        layout = meeting.layout()
        if reason := model_difference(layout.specs, self._specs):
            raise FleetMismatch(reason)
        self.close()
        self._spare.clear()
        self._sender = _Sender(meeting=meeting, layout=layout, links=Links(self._timeouts))
        return self._sender

    def _map(self, sender: _Sender, packed: Sequence[Packed]) -> dict[int, MappedMemory]:
        mapped: dict[int, MappedMemory] = {}
        for number, (parcel, each) in enumerate(zip(sender.layout.parcels, packed, strict=True)):
            memory = sender.mapped.get(each.address)
            if memory is None or not memory.is_current:
                memory = MappedMemory.open(each.address, parcel.num_bytes) if each.address else None
            if memory is not None and memory.hold():
                mapped[number] = memory
        # Those of versions before this one are likely to come again: senders take turns with their memories.
        sender.mapped |= {memory.address: memory for memory in mapped.values()}
        sender.mapped = {address: memory for address, memory in sender.mapped.items() if memory.is_current}
        return mapped

    def _memory(self, number: int, layout: Layout) -> torch.Tensor:
        if (spare := self._spare.pop(number, None)) is not None:
            return spare
        return torch.empty(layout.parcels[number].num_bytes, dtype=torch.uint8, device=self._device)


class _Check:
    """Of a parcel, chunk by chunk, as far as it has arrived."""

    def __init__(self, expected: Expected, number: int, data: torch.Tensor) -> None:
        self._chunks = expected.packed[number].chunks
        self._what = f"parcel {number} of version {expected.record.version}"
        self._data = data
        self._checked = 0

    def up_to(self, arrived: int) -> None:
        while (start := self._checked * CHUNK_BYTES) < arrived:
            stop = min(start + CHUNK_BYTES, len(self._data))
            if stop > arrived:
                return
            found, packed = chunk_digest(self._data[start:stop]), self._chunks[self._checked]
            if found != packed:
                raise WireError(f"chunk {self._checked} of {self._what} has digest {found}, packed was {packed}")
            self._checked += 1


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
