"""One attempt to send a version to one push group: offer, transfer, collect the members' reports.

run:  _offer ─▶ ready members ─▶ _transfer ─▶ _collect_reports ─▶ AttemptOutcome
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

import structlog

from async_rl.board.inbox import post
from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.protocols import Board
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.supervision.processes.descriptors import descriptors_are_scarce
from async_rl.transport.messages import (
    TO_WORKERS,
    PushBegin,
    PushCancel,
    PushFailed,
    PushOffer,
    PushReady,
    PushRefused,
    PushStaged,
)
from async_rl.transport.sending.membership import Membership
from async_rl.transport.sending.parcel_groups import ParcelGroups
from async_rl.transport.sending.rank_orders import SendParcel
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.replies import Replies
from async_rl.transport.wire.gpus import backend_among, takes_turns
from async_rl.types import VersionRecord

_GRACE_S = 0.5
"""Time for a reply from workers that have just replied, or that failed last time. A live event loop needs milliseconds, however
busy its threads are."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderParts:
    """What all attempts of a sender share."""

    board: Board
    wire: WireConfig
    rank_sender: RankSender
    """Rank 0's."""
    fence: int
    membership: Membership
    replies: Replies
    groups: ParcelGroups


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended, for each member of its push group."""

    staged: list[str] = field(default_factory=list[str])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """Member id -> why it does not get the version."""
    lost: list[str] = field(default_factory=list[str])
    """Dropped members that broke the attempt: they are silent, or do not reach the learner."""
    retryable: list[str] = field(default_factory=list[str])
    """Members that failed with the attempt and may be sent to again."""
    how: dict[str, str] = field(default_factory=dict[str, str])
    """Member id -> how the version travels to it: memory, gloo, nccl; "gloo, delta" if only what has changed is sent."""


class PushAttempt:
    """Run it once. A member's failure is in the outcome, never raised."""

    def __init__(
        self, parts: SenderParts, record: VersionRecord, generation: int, members: Sequence[str], trusted: Collection[str]
    ) -> None:
        """`trusted`: members that get a full operation timeout to reply; the others only a short time."""
        self._parts, self._replies = parts, parts.replies
        self._record, self._generation = record, generation
        self._members, self._trusted = members, trusted
        self._outcome = AttemptOutcome()

    async def run(self) -> AttemptOutcome:
        self._replies.start_attempt((self._parts.fence, self._generation), self._record)
        async with asyncio.TaskGroup() as beside:
            watch = beside.create_task(self._replies.watch_listing(self._members), name="weight-push-watch")
            if ready := await self._offer():
                abandoned = Event()
                try:
                    await self._transfer(ready, abandoned)
                finally:
                    abandoned.set()
                await self._collect_reports(list(ready))
                if len(self._outcome.staged) < len(ready):
                    self._parts.groups.discard()
            else:  # a member whose answer comes too late would wait for the transfer
                await self._cancel()
            watch.cancel()
        return self._outcome

    async def _offer(self) -> dict[str, PushReady]:
        """Offer the version; returns the replies of the members that are ready."""
        replies, timeout_s = self._replies, self._parts.wire.operation_timeout_s
        await self._post(
            PushOffer(fence=self._parts.fence, generation=self._generation, to=tuple(self._members), record=self._record)
        )
        await replies.wait_until(lambda: replies.all_answered(self._members), _GRACE_S)
        await replies.wait_until(lambda: replies.all_answered(self._trusted), timeout_s - _GRACE_S)
        ready: dict[str, PushReady] = {}
        for member in self._members:
            match replies.last.get(member):
                case PushReady() as reply:
                    ready[member] = reply
                case PushRefused(reason=reason):
                    self._outcome.dropped[member] = reason
                case PushFailed(reason=reason):
                    self._drop_failed(member, reason)
                case _ if replies.is_gone(member):
                    self._outcome.dropped[member] = "left the run"
                case _ if member in self._trusted:
                    self._drop_silent(member, f"did not answer the offer within {timeout_s:g} s")
                case _:
                    self._drop_failed(member, f"failed, and did not answer the next offer within {_GRACE_S:g} s")
        return ready

    async def _transfer(self, ready: Mapping[str, PushReady], abandoned: Event) -> None:
        """Send the parcels and wait for all reports; give up at the first failure."""
        parts, members = self._parts, list(ready)
        num_parcels = len(parts.rank_sender.layout.parcels)
        # Members that read in place are not in a group; they may even share the learner's GPU.
        grouped = [each for each in members if len(ready[each].by_memory) < num_parcels]
        senders = {parcel.gpu for parcel in parts.rank_sender.packed[self._record.version]}
        backend = backend_among([*senders, *parts.membership.gpus_of(grouped)])
        if descriptors_are_scarce() or any(reply.is_short_of_descriptors for reply in ready.values()):
            parts.groups.discard()
        groups = parts.groups.assign(num_parcels, ready, backend)
        with_delta = {member for group in groups if group.base >= 0 for member in group.members}
        for member in members:
            sent = f"{backend}, delta" if member in with_delta else backend
            self._outcome.how[member] = sent if len(ready[member].by_memory) < num_parcels else "memory"
        await self._post(
            PushBegin(
                fence=parts.fence,
                generation=self._generation,
                members=tuple(members),
                groups=groups,
                backend=backend,
                transfer_bytes=int(parts.wire.bucket_mb * (1 << 20)),
            )
        )
        orders = [
            SendParcel(
                parcel=group.parcel,
                version=self._record.version,
                group=group.group,
                size=len(group.members) + 1,
                backend=backend,
                base=group.base,
                deltas=parts.rank_sender.deltas,
            )
            for group in groups
        ]
        try:
            async with asyncio.TaskGroup() as both:
                # Members that read in place cannot break the transfer for others.
                watch = both.create_task(self._raise_when_broken(grouped), name="weight-push-failures")
                if orders:
                    in_turn = takes_turns(backend)
                    await in_daemon_thread(
                        lambda: parts.rank_sender.run_orders(orders, abandoned, in_turn=in_turn), name="weight-delivery"
                    )
                # All parcels are sent; the members still verify digests.
                await self._replies.wait_until(lambda: self._replies.all_reported(members), parts.wire.operation_timeout_s)
                watch.cancel()
        except* WireError as broken:
            _log.info("a weight push failed", generation=self._generation, reason=str(broken.exceptions[0]))

    async def _raise_when_broken(self, grouped: Collection[str]) -> None:
        replies = self._replies
        await replies.wait_until(lambda: any(replies.has_failed(member) or replies.is_gone(member) for member in grouped))
        raise WireError("a member failed or left the run")

    async def _collect_reports(self, ready: Sequence[str]) -> None:
        replies, outcome = self._replies, self._outcome
        if not all(isinstance(replies.last.get(member), PushStaged | PushFailed) for member in ready):
            await self._cancel()
            await replies.wait_until(lambda: replies.all_reported(ready), _GRACE_S)
        failed: dict[str, str] = {}
        for member in ready:
            match replies.last.get(member):
                case PushStaged():
                    outcome.staged.append(member)
                case PushFailed(reason=reason, is_cut_off=True):
                    self._drop_failed(member, f"does not reach the learner: {reason}", is_cut_off=True)
                    outcome.lost.append(member)
                case PushFailed(reason=reason):
                    failed[member] = reason
                case _:
                    self._drop_silent(member, "left the run" if replies.has_left(member) else "died or hung while receiving")
                    outcome.lost.append(member)
        if len(failed) == 1 and not outcome.lost:
            for member, reason in failed.items():
                self._drop_failed(member, reason)
        else:
            outcome.retryable.extend(failed)

    def _drop_silent(self, member: str, reason: str) -> None:
        self._parts.membership.mark_silent(member)
        self._outcome.dropped[member] = reason

    def _drop_failed(self, member: str, reason: str, *, is_cut_off: bool = False) -> None:
        self._parts.membership.mark_failed(member, self._record.version, is_cut_off=is_cut_off)
        self._outcome.dropped[member] = reason

    async def _cancel(self) -> None:
        await self._post(PushCancel(fence=self._parts.fence, generation=self._generation))

    async def _post(self, message: PushOffer | PushBegin | PushCancel) -> None:
        await post(self._parts.board, TO_WORKERS, message)
