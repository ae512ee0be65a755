"""The learner's end of the weight wire.

push:  offer ─▶ everybody ready? ─▶ begin ─▶ delivery ─▶ everybody staged? ──yes──▶ report
         ▲                                                     │ no
         └───────── the survivors, fresh groups ◀── cancel ◀───┘   who stays silent is dropped
flip:  the version is live, serve it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from types import TracebackType

import structlog
import torch

from async_rl.board.inbox import Inbox, post
from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.protocols import Board
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.supervision.processes.descriptors import descriptors_are_scarce
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    PushBegin,
    PushCancel,
    PushFailed,
    PushOffer,
    PushReady,
    PushRefused,
    PushStaged,
    VersionLive,
)
from async_rl.transport.packed_source import NOTES_EXPIRE_S, PackedSource, write_layout, write_source
from async_rl.transport.sending.groups import ParcelGroups
from async_rl.transport.sending.membership import Membership
from async_rl.transport.sending.partitions import Partitions
from async_rl.transport.sending.rank_orders import SendParcel
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.replies import Replies
from async_rl.transport.sending.snapshot_service import SnapshotService
from async_rl.transport.wire.gpus import backend_among, gpu_of
from async_rl.transport.wire.process_group import WireTimeouts
from async_rl.types import VersionRecord

_GRACE_S = 0.5
"""Who has just spoken, or is not to be trusted, answers within this time or is not counted on: a living event loop needs
milliseconds, however busy its threads are."""

_APART = 20
"""Operation timeouts for which workers that could not be sent to together are sent to apart."""

_RECHECK_S = 5.0
"""How long `needed` trusts that every member in need has said so."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    staged: tuple[str, ...]
    """Hold the version, verified, and serve it from the flip on."""
    dropped: Mapping[str, str]
    """Member id -> why it did not get the version."""
    num_bytes: int
    """Of one copy of the weights."""
    seconds: float


class WeightSender:
    """Hold it open with `async with` for as long as the learner lives. Pushes run one at a time."""

    def __init__(self, board: Board, wire: WireConfig, depot: RankSender, device: str, *, fence: int) -> None:
        """`depot` is rank 0's."""
        self._board = board
        self._wire = wire
        self._depot = depot
        self._device = torch.device(device)
        self._fence = fence
        self._timeouts = WireTimeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._membership = Membership(board, rest_s=wire.rendezvous_timeout_s)
        self._hearing = Replies(board, self._membership)
        self._generation = 0
        self._cohorts = ParcelGroups(fence)
        self._apart = Partitions(_APART * wire.operation_timeout_s)
        self._pushing = asyncio.Lock()
        self._listening = asyncio.TaskGroup()
        self._shelf = SnapshotService(depot, wire.snapshot_every)

    async def __aenter__(self) -> WeightSender:
        inbox = await Inbox.open(self._board, TO_LEARNER, TO_LEARNER_MESSAGES)
        await self._listening.__aenter__()
        self._services = [
            self._listening.create_task(self._hearing.listen(inbox), name="weight-replies"),
            self._listening.create_task(self._shelf.run(), name="weight-snapshots"),
            self._listening.create_task(self._stay_written(), name="weight-notes"),
        ]
        await write_layout(self._board, self._depot.layout, fence=self._fence)
        await self._write_packed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self._services:
            service.cancel()
        await self._listening.__aexit__(kind, error, trace)

    async def needy(self, version: int) -> list[str]:
        """The live members that need `version`."""
        return await self._membership.needy(version)

    async def needed(self, version: int) -> list[str]:
        """Wait until a live member needs `version`: it joined, came back, or missed it."""
        while True:
            heard = self._hearing.num_heard
            if needy := await self.needy(version):
                return needy
            await self._hearing.until(lambda heard=heard: self._hearing.num_heard != heard, _RECHECK_S)

    async def push(self, record: VersionRecord) -> PushReport:
        """Bring a version to every live member that needs it; return when each has it staged or was dropped.

        The depot has packed it, and `record.digest` is what the depot says. Repeating it serves whoever needs the version
        by then. A member's failure is in the report, never raised.
        """
        async with self._pushing:
            started = time.monotonic()
            self._cohorts.remember(record)
            await self._write_packed()
            staged: list[str] = []
            dropped: dict[str, str] = {}
            needy = await self.needy(record.version)
            trusted = {member for member in needy if self._membership.is_trusted(member)}
            cohorts = self._apart.round(needy)
            for cohort in cohorts:
                outcome = await self._attempt(record, cohort, trusted.intersection(cohort))
                staged += outcome.staged
                dropped |= outcome.dropped
                trusted.difference_update(cohort)  # they have just spoken
                cohorts.served(outcome.staged)
                if outcome.lost:  # that explains why the others failed
                    cohorts.again(outcome.victims)
                else:
                    cohorts.divide(outcome.victims)
            self._apart.learn(cohorts.found)
            for member in staged:
                self._membership.staged(member, record.version)
            for member in dropped:
                self._membership.given_up(member, record.version)
            for member, reason in dropped.items():
                tell = _log.info if self._hearing.said_goodbye(member) else _log.warning
                tell("left out of a weight push", member=member, version=record.version, reason=reason)
            return PushReport(
                staged=tuple(staged),
                dropped=dropped,
                num_bytes=self._depot.layout.num_bytes,
                seconds=time.monotonic() - started,
            )

    async def flip(self, record: VersionRecord) -> None:
        """Tell everybody that the version is live. Call it after `buffer.publish`; repeating it is harmless."""
        await post(self._board, TO_WORKERS, VersionLive(fence=self._fence, record=record))
        self._shelf.went_live(record)

    async def _write_packed(self) -> None:
        """For whoever takes a version."""
        depot = self._depot
        packed = PackedSource(fence=self._fence, host=self._wire.host, layout=depot.layout, versions=depot.packed)
        await write_source(self._board, packed)

    async def _stay_written(self) -> None:
        """
        consumes: nothing               waits for:    a quarter of the time that notes are kept
        produces: the notes, again      unblocked by: the clock
        """
        while True:
            await asyncio.sleep(NOTES_EXPIRE_S / 4)
            await write_layout(self._board, self._depot.layout, fence=self._fence)
            await self._write_packed()

    async def _attempt(self, record: VersionRecord, cohort: Sequence[str], trusted: Collection[str]) -> _Outcome:
        self._generation += 1
        self._hearing.begin((self._fence, self._generation), record)
        outcome = _Outcome()
        async with asyncio.TaskGroup() as beside:
            watch = beside.create_task(self._hearing.watch_listing(cohort), name="weight-push-watch")
            if ready := await self._gather(record, cohort, trusted, outcome):
                released = Event()
                try:
                    await self._deliver(record, ready, released)
                finally:
                    released.set()
                await self._settle_accounts(record, list(ready), outcome)
                if len(outcome.staged) < len(ready):
                    self._cohorts.broke()
            watch.cancel()
        return outcome

    async def _gather(
        self, record: VersionRecord, cohort: Sequence[str], trusted: Collection[str], outcome: _Outcome
    ) -> dict[str, PushReady]:
        """Offer the version, and return who is ready for it."""
        offer = PushOffer(
            fence=self._fence,
            generation=self._generation,
            to=tuple(cohort),
            record=record,
        )
        await post(self._board, TO_WORKERS, offer)
        await self._hearing.until(lambda: self._hearing.all_answered(cohort), _GRACE_S)
        await self._hearing.until(lambda: self._hearing.all_answered(trusted), self._timeouts.operation_s - _GRACE_S)
        ready: dict[str, PushReady] = {}
        for member in cohort:
            match self._hearing.replies.get(member):
                case PushReady() as reply:
                    ready[member] = reply
                case PushRefused(reason=reason):
                    outcome.dropped[member] = reason
                case PushFailed(reason=reason):
                    self._blame(record, member, reason, outcome)
                case _ if self._hearing.is_gone(member):
                    outcome.dropped[member] = "left the run"
                case _ if member in trusted:
                    self._lose(member, f"did not answer the offer within {self._timeouts.operation_s:g} s", outcome)
                case _:
                    self._blame(record, member, f"failed, and did not answer the next offer within {_GRACE_S:g} s", outcome)
        return ready

    async def _deliver(self, record: VersionRecord, ready: Mapping[str, PushReady], released: Event) -> None:
        """Send, and wait for everybody's report; give up at the first sign that something is broken."""
        members, parcels = list(ready), len(self._depot.layout.parcels)
        # Those who read in place may well share the learner's GPU.
        grouped = [each for each in members if len(ready[each].by_memory) < parcels]
        backend = backend_among([gpu_of(self._device), *self._membership.gpus_of(grouped)])
        if descriptors_are_scarce() or any(reply.is_short_of_descriptors for reply in ready.values()):
            self._cohorts.broke()
        wires = self._cohorts.wires(parcels, ready, backend)
        begin = PushBegin(
            fence=self._fence,
            generation=self._generation,
            members=tuple(members),
            wires=wires,
            backend=backend,
            transfer_bytes=int(self._wire.bucket_mb * (1 << 20)),
        )
        await post(self._board, TO_WORKERS, begin)
        errands = [
            SendParcel(
                parcel=wire.parcel,
                version=record.version,
                group=wire.group,
                size=len(wire.members) + 1,
                backend=backend,
                base=wire.base,
            )
            for wire in wires
        ]
        try:
            async with asyncio.TaskGroup() as both:
                # Who reads in place breaks nothing for others.
                watch = both.create_task(self._raise_when_broken(grouped), name="weight-push-failures")
                if errands:
                    await in_daemon_thread(lambda: self._depot.deliver(errands, released), name="weight-delivery")
                # Everybody has everything; what is left is their verdict on the digests.
                await self._hearing.until(lambda: self._hearing.all_reported(members), self._timeouts.operation_s)
                watch.cancel()
        except* WireError as broken:
            _log.info("a weight push broke", generation=self._generation, reason=str(broken.exceptions[0]))

    async def _raise_when_broken(self, grouped: Collection[str]) -> None:
        hearing = self._hearing
        await hearing.until(lambda: any(hearing.has_failed(member) or hearing.is_gone(member) for member in grouped))
        raise WireError("a member failed or left the run")

    async def _settle_accounts(self, record: VersionRecord, ready: Sequence[str], outcome: _Outcome) -> None:
        if not all(isinstance(self._hearing.replies.get(member), PushStaged | PushFailed) for member in ready):
            await post(self._board, TO_WORKERS, PushCancel(fence=self._fence, generation=self._generation))
            await self._hearing.until(lambda: self._hearing.all_reported(ready), _GRACE_S)
        failed: dict[str, str] = {}
        for member in ready:
            match self._hearing.replies.get(member):
                case PushStaged():
                    outcome.staged.append(member)
                case PushFailed(reason=reason):
                    failed[member] = reason
                case _:
                    goodbye = self._hearing.said_goodbye(member)
                    self._lose(member, "left the run" if goodbye else "died or hung while receiving", outcome)
                    outcome.lost.append(member)
        if len(failed) == 1 and not outcome.lost:
            for member, reason in failed.items():
                self._blame(record, member, reason, outcome)
        else:
            outcome.victims.extend(failed)

    def _lose(self, member: str, reason: str, outcome: _Outcome) -> None:
        self._membership.silent(member)
        outcome.dropped[member] = reason

    def _blame(self, record: VersionRecord, member: str, reason: str, outcome: _Outcome) -> None:
        self._membership.failed(member, record.version)
        outcome.dropped[member] = reason


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one attempt ended, for each member of its cohort."""

    staged: list[str] = field(default_factory=list[str])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[str] = field(default_factory=list[str])
    """Of the dropped: those with whom the attempt broke."""
    victims: list[str] = field(default_factory=list[str])
    """Failed with the attempt; may try again."""
