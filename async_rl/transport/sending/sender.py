"""The learner's end of the weight wire.

push:  offer ─▶ all ready? ─▶ begin ─▶ transfer ─▶ all staged? ──yes──▶ report
         ▲                                             │ no
         └── the surviving workers, new groups ◀── cancel   silent workers are dropped
flip:  tells the workers to serve the version, once it is live
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
from async_rl.transport.sending.membership import Membership
from async_rl.transport.sending.parcel_groups import ParcelGroups
from async_rl.transport.sending.partitions import Partitions
from async_rl.transport.sending.rank_orders import SendParcel
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.replies import Replies
from async_rl.transport.sending.snapshot_service import SnapshotService
from async_rl.transport.wire.gpus import backend_among, gpu_of
from async_rl.transport.wire.process_group import WireTimeouts
from async_rl.types import VersionRecord

_GRACE_S = 0.5
"""Time for a reply from workers that have just replied, or that failed last time. A live event loop needs milliseconds, however
busy its threads are."""

_PARTITIONED_TIMEOUTS = 20
"""Workers that could not be sent to together are sent to separately for this many operation timeouts."""

_RECHECK_S = 5.0
"""Interval at which `wait_for_members_behind` looks at the listing again without a message."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    staged: tuple[str, ...]
    """Members that hold the version, verified, and serve it once it is live."""
    dropped: Mapping[str, str]
    """Member id -> why it did not get the version."""
    num_bytes: int
    """Size of one copy of the weights."""
    seconds: float


class WeightSender:
    """Pushes versions to workers. Keep it open with `async with` for the learner's life. Pushes run one at a time."""

    def __init__(self, board: Board, wire: WireConfig, rank_sender: RankSender, device: str, *, fence: int) -> None:
        """`rank_sender` is rank 0's."""
        self._board = board
        self._wire = wire
        self._rank_sender = rank_sender
        self._device = torch.device(device)
        self._fence = fence
        self._timeouts = WireTimeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._membership = Membership(board, rest_s=wire.rendezvous_timeout_s)
        self._replies = Replies(board, self._membership)
        self._generation = 0
        self._parcel_groups = ParcelGroups(fence)
        self._partitions = Partitions(_PARTITIONED_TIMEOUTS * wire.operation_timeout_s)
        self._pushing = asyncio.Lock()
        self._listening = asyncio.TaskGroup()
        self._snapshots = SnapshotService(rank_sender, wire.snapshot_every)

    async def __aenter__(self) -> WeightSender:
        inbox = await Inbox.open(self._board, TO_LEARNER, TO_LEARNER_MESSAGES)
        await self._listening.__aenter__()
        self._services = [
            self._listening.create_task(self._replies.listen(inbox), name="weight-replies"),
            self._listening.create_task(self._snapshots.run(), name="weight-snapshots"),
            self._listening.create_task(self._refresh_notes(), name="weight-notes"),
        ]
        await write_layout(self._board, self._rank_sender.layout, fence=self._fence)
        await self._write_packed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self._services:
            service.cancel()
        await self._listening.__aexit__(kind, error, trace)

    async def members_behind(self, version: int) -> list[str]:
        """The live members that need `version`."""
        return await self._membership.members_behind(version)

    async def wait_for_members_behind(self, version: int) -> list[str]:
        """Wait until a live member needs `version`: it joined, came back, or missed it."""
        while True:
            seen = self._replies.num_messages
            if behind := await self.members_behind(version):
                return behind
            await self._replies.wait_until(lambda seen=seen: self._replies.num_messages != seen, _RECHECK_S)

    async def push(self, record: VersionRecord) -> PushReport:
        """Send a version to every live member that needs it; returns when each has it staged or was dropped.

        The version is registered with the rank sender, which gave `record.digest`. A repeated push serves the members that
        need the version by then. A member's failure is in the report, never raised.
        """
        async with self._pushing:
            started = time.monotonic()
            self._parcel_groups.remember(record)
            await self._write_packed()
            staged: list[str] = []
            dropped: dict[str, str] = {}
            behind = await self.members_behind(record.version)
            trusted = {member for member in behind if self._membership.is_trusted(member)}
            push_groups = self._partitions.push_groups(behind)
            for push_group in push_groups:
                outcome = await self._attempt(record, push_group, trusted.intersection(push_group))
                staged += outcome.staged
                dropped |= outcome.dropped
                trusted.difference_update(push_group)  # they have just replied
                push_groups.served(outcome.staged)
                if outcome.lost:  # the likely cause of the other failures
                    push_groups.retry(outcome.retryable)
                else:
                    push_groups.split(outcome.retryable)
            self._partitions.remember(push_groups.found)
            for member in staged:
                self._membership.mark_staged(member, record.version)
            for member in dropped:
                self._membership.mark_given_up(member, record.version)
            for member, reason in dropped.items():
                tell = _log.info if self._replies.has_left(member) else _log.warning
                tell("left out of a weight push", member=member, version=record.version, reason=reason)
            return PushReport(
                staged=tuple(staged),
                dropped=dropped,
                num_bytes=self._rank_sender.layout.num_bytes,
                seconds=time.monotonic() - started,
            )

    async def flip(self, record: VersionRecord) -> None:
        """Tell the workers that the version is live. Call it after `buffer.publish`; a repeated call is harmless."""
        await post(self._board, TO_WORKERS, VersionLive(fence=self._fence, record=record))
        self._snapshots.went_live(record)

    async def _write_packed(self) -> None:
        """Tell workers where the packed versions are."""
        rank_sender = self._rank_sender
        packed = PackedSource(fence=self._fence, host=self._wire.host, layout=rank_sender.layout, versions=rank_sender.packed)
        await write_source(self._board, packed)

    async def _refresh_notes(self) -> None:
        """
        consumes: nothing                    waits for:    a quarter of the notes' lifetime
        produces: the notes on the board     unblocked by: the clock
        """
        while True:
            await asyncio.sleep(NOTES_EXPIRE_S / 4)
            await write_layout(self._board, self._rank_sender.layout, fence=self._fence)
            await self._write_packed()

    async def _attempt(self, record: VersionRecord, push_group: Sequence[str], trusted: Collection[str]) -> _AttemptOutcome:
        self._generation += 1
        self._replies.start_attempt((self._fence, self._generation), record)
        outcome = _AttemptOutcome()
        async with asyncio.TaskGroup() as beside:
            watch = beside.create_task(self._replies.watch_listing(push_group), name="weight-push-watch")
            if ready := await self._offer(record, push_group, trusted, outcome):
                abandoned = Event()
                try:
                    await self._transfer(record, ready, abandoned)
                finally:
                    abandoned.set()
                await self._collect_reports(record, list(ready), outcome)
                if len(outcome.staged) < len(ready):
                    self._parcel_groups.discard()
            watch.cancel()
        return outcome

    async def _offer(
        self, record: VersionRecord, push_group: Sequence[str], trusted: Collection[str], outcome: _AttemptOutcome
    ) -> dict[str, PushReady]:
        """Offer the version; returns the replies of the members that are ready."""
        offer = PushOffer(
            fence=self._fence,
            generation=self._generation,
            to=tuple(push_group),
            record=record,
        )
        await post(self._board, TO_WORKERS, offer)
        await self._replies.wait_until(lambda: self._replies.all_answered(push_group), _GRACE_S)
        await self._replies.wait_until(lambda: self._replies.all_answered(trusted), self._timeouts.operation_s - _GRACE_S)
        ready: dict[str, PushReady] = {}
        for member in push_group:
            match self._replies.last.get(member):
                case PushReady() as reply:
                    ready[member] = reply
                case PushRefused(reason=reason):
                    outcome.dropped[member] = reason
                case PushFailed(reason=reason):
                    self._drop_failed(record, member, reason, outcome)
                case _ if self._replies.is_gone(member):
                    outcome.dropped[member] = "left the run"
                case _ if member in trusted:
                    self._drop_silent(member, f"did not answer the offer within {self._timeouts.operation_s:g} s", outcome)
                case _:
                    self._drop_failed(
                        record, member, f"failed, and did not answer the next offer within {_GRACE_S:g} s", outcome
                    )
        return ready

    async def _transfer(self, record: VersionRecord, ready: Mapping[str, PushReady], abandoned: Event) -> None:
        """Send the parcels and wait for all reports; give up at the first failure."""
        members, parcels = list(ready), len(self._rank_sender.layout.parcels)
        # Members that read in place are not in a group; they may even share the learner's GPU.
        grouped = [each for each in members if len(ready[each].by_memory) < parcels]
        backend = backend_among([gpu_of(self._device), *self._membership.gpus_of(grouped)])
        if descriptors_are_scarce() or any(reply.is_short_of_descriptors for reply in ready.values()):
            self._parcel_groups.discard()
        groups = self._parcel_groups.assign(parcels, ready, backend)
        begin = PushBegin(
            fence=self._fence,
            generation=self._generation,
            members=tuple(members),
            groups=groups,
            backend=backend,
            transfer_bytes=int(self._wire.bucket_mb * (1 << 20)),
        )
        await post(self._board, TO_WORKERS, begin)
        orders = [
            SendParcel(
                parcel=group.parcel,
                version=record.version,
                group=group.group,
                size=len(group.members) + 1,
                backend=backend,
                base=group.base,
            )
            for group in groups
        ]
        try:
            async with asyncio.TaskGroup() as both:
                # Members that read in place cannot break the transfer for others.
                watch = both.create_task(self._raise_when_broken(grouped), name="weight-push-failures")
                if orders:
                    await in_daemon_thread(lambda: self._rank_sender.run_orders(orders, abandoned), name="weight-delivery")
                # All parcels are sent; the members still verify digests.
                await self._replies.wait_until(lambda: self._replies.all_reported(members), self._timeouts.operation_s)
                watch.cancel()
        except* WireError as broken:
            _log.info("a weight push failed", generation=self._generation, reason=str(broken.exceptions[0]))

    async def _raise_when_broken(self, grouped: Collection[str]) -> None:
        replies = self._replies
        await replies.wait_until(lambda: any(replies.has_failed(member) or replies.is_gone(member) for member in grouped))
        raise WireError("a member failed or left the run")

    async def _collect_reports(self, record: VersionRecord, ready: Sequence[str], outcome: _AttemptOutcome) -> None:
        if not all(isinstance(self._replies.last.get(member), PushStaged | PushFailed) for member in ready):
            await post(self._board, TO_WORKERS, PushCancel(fence=self._fence, generation=self._generation))
            await self._replies.wait_until(lambda: self._replies.all_reported(ready), _GRACE_S)
        failed: dict[str, str] = {}
        for member in ready:
            match self._replies.last.get(member):
                case PushStaged():
                    outcome.staged.append(member)
                case PushFailed(reason=reason):
                    failed[member] = reason
                case _:
                    has_left = self._replies.has_left(member)
                    self._drop_silent(member, "left the run" if has_left else "died or hung while receiving", outcome)
                    outcome.lost.append(member)
        if len(failed) == 1 and not outcome.lost:
            for member, reason in failed.items():
                self._drop_failed(record, member, reason, outcome)
        else:
            outcome.retryable.extend(failed)

    def _drop_silent(self, member: str, reason: str, outcome: _AttemptOutcome) -> None:
        self._membership.mark_silent(member)
        outcome.dropped[member] = reason

    def _drop_failed(self, record: VersionRecord, member: str, reason: str, outcome: _AttemptOutcome) -> None:
        self._membership.mark_failed(member, record.version)
        outcome.dropped[member] = reason


@dataclass(frozen=True, slots=True)
class _AttemptOutcome:
    """How one attempt ended, for each member of its push group."""

    staged: list[str] = field(default_factory=list[str])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    lost: list[str] = field(default_factory=list[str])
    """Dropped members whose silence broke the attempt."""
    retryable: list[str] = field(default_factory=list[str])
    """Members that failed with the attempt and may be sent to again."""
