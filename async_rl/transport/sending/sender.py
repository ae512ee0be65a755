"""The learner's end of the weight wire.

push:  offer ─▶ who is ready? ─▶ begin ─▶ transfer ─▶ all staged? ──yes──▶ report
         ▲                                               │ no
         └── those that may be retried ◀── cancel ◀──────┘   silent workers are dropped
             (together if one was lost, else in smaller push groups; with new process groups)
flip:  tells the workers to serve the version, once it is live
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from async_rl.board.inbox import Inbox, post
from async_rl.config import WireConfig
from async_rl.protocols import Board
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    ToLearner,
    VersionLive,
)
from async_rl.transport.packed_source import NOTES_EXPIRE_S, PackedSource, write_layout, write_source
from async_rl.transport.sending.membership import Membership
from async_rl.transport.sending.parcel_groups import ParcelGroups
from async_rl.transport.sending.partitions import Partitions
from async_rl.transport.sending.push_attempt import PushAttempt, SenderParts
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.replies import Replies
from async_rl.transport.sending.snapshot_service import SnapshotService
from async_rl.types import VersionRecord

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
    how: Mapping[str, str]
    """Member id -> how the version travelled to it (AttemptOutcome.how)."""
    num_bytes: int
    """Size of one copy of the weights."""
    seconds: float


class WeightSender:
    """Pushes versions to workers. Keep it open with `async with` for the learner's life. Pushes run one at a time."""

    def __init__(self, board: Board, wire: WireConfig, rank_sender: RankSender, *, fence: int) -> None:
        """`rank_sender` is rank 0's."""
        membership = Membership(board, rest_s=wire.rendezvous_timeout_s)
        self._parts = SenderParts(
            board=board,
            wire=wire,
            rank_sender=rank_sender,
            fence=fence,
            membership=membership,
            replies=Replies(board, membership),
            groups=ParcelGroups(fence),
        )
        self._generation = 0
        self._partitions = Partitions(_PARTITIONED_TIMEOUTS * wire.operation_timeout_s)
        self._pushing = asyncio.Lock()
        self._listening = asyncio.TaskGroup()
        self._snapshots = SnapshotService(rank_sender, wire.snapshot_every)

    async def __aenter__(self) -> WeightSender:
        inbox = await Inbox[ToLearner].open(self._parts.board, TO_LEARNER, TO_LEARNER_MESSAGES)
        await self._listening.__aenter__()
        self._services = [
            self._listening.create_task(self._parts.replies.listen(inbox), name="weight-replies"),
            self._listening.create_task(self._snapshots.run(), name="weight-snapshots"),
            self._listening.create_task(self._refresh_notes(), name="weight-notes"),
        ]
        await self._write_notes()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        for service in self._services:
            service.cancel()
        await self._listening.__aexit__(*problem)

    async def members_behind(self, version: int) -> list[str]:
        """The live members that need `version`."""
        return await self._parts.membership.members_behind(version)

    async def wait_for_members_behind(self, version: int) -> list[str]:
        """Wait until a live member needs `version`: it joined, came back, or missed it."""
        replies = self._parts.replies
        while True:
            seen = replies.num_messages
            if behind := await self.members_behind(version):
                return behind
            await replies.wait_until(lambda seen=seen: replies.num_messages != seen, _RECHECK_S)

    async def push(self, record: VersionRecord) -> PushReport:
        """Send a version to every live member that needs it; returns when each has it staged or was dropped.

        The ranks have packed the version: `record.digest` is what they returned. A repeated push serves the members that
        need the version by then. A member's failure is in the report, never raised.
        """
        async with self._pushing:
            started, membership = time.monotonic(), self._parts.membership
            self._parts.groups.remember(record)
            await self._write_packed()
            staged: list[str] = []
            dropped: dict[str, str] = {}
            how: dict[str, str] = {}
            behind = await self.members_behind(record.version)
            trusted = {member for member in behind if membership.is_trusted(member)}
            push_groups = self._partitions.push_groups(behind)
            for push_group in push_groups:
                self._generation += 1
                awaited = trusted.intersection(push_group)
                outcome = await PushAttempt(self._parts, record, self._generation, push_group, awaited).run()
                staged += outcome.staged
                dropped |= outcome.dropped
                how |= outcome.how
                trusted.difference_update(push_group)  # they have just replied
                push_groups.served(outcome.staged)
                if outcome.lost:  # the likely cause of the other failures
                    push_groups.retry(outcome.retryable)
                else:
                    push_groups.split(outcome.retryable)
            self._partitions.remember(push_groups.found)
            for member in staged:
                membership.mark_staged(member, record.version)
            for member in dropped:
                membership.mark_given_up(member, record.version)
            for member, reason in dropped.items():
                tell = _log.info if self._parts.replies.has_left(member) else _log.warning
                tell("left out of a weight push", member=member, version=record.version, reason=reason)
            return PushReport(
                staged=tuple(staged),
                dropped=dropped,
                how={member: how[member] for member in staged},
                num_bytes=self._parts.rank_sender.layout.num_bytes,
                seconds=time.monotonic() - started,
            )

    async def flip(self, record: VersionRecord) -> None:
        """Tell the workers that the version is live. Call it after `buffer.publish`; a repeated call is harmless."""
        await post(self._parts.board, TO_WORKERS, VersionLive(fence=self._parts.fence, record=record))
        self._snapshots.went_live(record)

    async def _write_packed(self) -> None:
        parts, rank_sender = self._parts, self._parts.rank_sender
        packed = PackedSource(
            fence=parts.fence,
            host=parts.wire.host,
            layout=rank_sender.layout,
            deltas=rank_sender.deltas,
            versions=rank_sender.packed,
        )
        await write_source(parts.board, packed)

    async def _write_notes(self) -> None:
        await write_layout(self._parts.board, self._parts.rank_sender.layout, fence=self._parts.fence)
        await self._write_packed()

    async def _refresh_notes(self) -> None:
        """
        consumes: nothing                    waits for:    a quarter of the notes' lifetime
        produces: the notes on the board     unblocked by: the clock
        """
        while True:
            await asyncio.sleep(NOTES_EXPIRE_S / 4)
            await self._write_notes()
