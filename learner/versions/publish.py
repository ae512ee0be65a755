"""When a version goes out, and what must have happened before it is live.

    offer(version) ──▶ push to every member ──▶ all staged ──▶ buffer.publish ──▶ flip ──▶ buffer.release(slots)

The loop says which weights it holds, and offers those that are due (push_policy.py) and that it has packed; pushing happens
beside the next step. When the fleet is slower than the learner, versions in between are skipped: the age bound stays true,
because slots return only with the version that goes live.

People may ask for a push, pin what is live, or have a checkpoint served instead (learner/versions/requests.py). What only the
loop can do about it, packing between two steps, is `wished` from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rl.replay_protocol import ReplayBuffer
from async_rl.transport.sending.sender import PushReport, WeightSender
from async_rl.types import VersionRecord
from learner.progress import Progress
from learner.versions.push_policy import PushPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPush:
    """Packed, to be pushed."""

    record: VersionRecord
    releases: int
    """The step up to which slots return when it goes live."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedPush:
    """A version that went live, to the workers that were there."""

    record: VersionRecord
    report: PushReport
    waited_s: float
    """Packed, until its push began."""
    at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    checkpoint: Path
    step: int


class Publisher:
    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        sender: WeightSender,
        policy: PushPolicy,
        now: Callable[[], float] = time.monotonic,
    ):
        self._buffer, self._fence, self._sender = buffer, fence, sender
        self._policy, self._now = policy, now
        self._newest: PendingPush | None = None
        self._sent: PendingPush | None = None
        """The last one whose push began: live, or about to be."""
        self._has_news = asyncio.Event()
        self._changed = asyncio.Condition()
        self._is_hurried = False
        self._rollback: Rollback | None = None
        self.reached: Progress | None = None
        """What the learner holds. The loop keeps it up to date."""
        self.wished = asyncio.Event()
        """Somebody asked for what the loop must do."""
        self.live_version = -1
        self.pinned = ""
        """Why versions are held back, for people; empty when they are not."""
        self.last_push: CompletedPush | None = None
        self.pushes = 0
        self.coalesced = 0
        """Versions that were packed, and overtaken before their push began."""

    @property
    def needed(self) -> set[int]:
        """The versions that may still be sent: the newest, the one under way, and to whoever joins what is live."""
        return {self.live_version, *(offered.record.version for offered in (self._newest, self._sent) if offered is not None)}

    @property
    def remark(self) -> str:
        """For a person who wonders why nothing happens."""
        return f"; the weights are pinned ({self.pinned}), `async-rl weights pin off` ends it" if self.pinned else ""

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """What the learner holds was not offered, and could be."""
        return self.reached is not None and not self.pinned and not self._was_offered(self.reached.version)

    @property
    def is_due(self) -> bool:
        """It should be packed and offered now."""
        if not self.is_held_back or self._newest is None or self._is_hurried:
            return self.is_held_back
        assert self.reached is not None
        steps, seconds = self.reached.step - self._newest.releases, self._now() - self._newest.at
        return self._policy.is_due(steps=steps, seconds=seconds)

    def offer(self, record: VersionRecord, *, releases: int) -> None:
        """Its weights are packed. It takes the place of one that nobody has begun to push."""
        if self._newest is not self._sent:
            self.coalesced += 1
        self._is_hurried = False
        self._newest = PendingPush(record=record, releases=releases, at=self._now())
        self._has_news.set()

    def take_rollback(self) -> Rollback | None:
        """What is to be served instead of newer weights, if somebody asked since the last call."""
        asked, self._rollback = self._rollback, None
        return asked

    async def until_live(self, version: int) -> bool:
        """Or something newer. False when it was held back, so that it may never be."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.live_version >= version or not self._was_offered(version))
            return self.live_version >= version

    def _was_offered(self, version: int) -> bool:
        return self._newest is not None and self._newest.record.version >= version

    # -- people --------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Push what the learner holds after the step that it is at, whatever the policy says."""
        self._is_hurried = True
        self.wished.set()

    async def pin(self, why: str) -> VersionRecord | None:
        """Nothing newer goes out than what is live, or already on its way: this, if there is anything."""
        async with self._changed:
            self.pinned, self._newest = why, self._sent
            self._changed.notify_all()
        return self._sent.record if self._sent is not None else None

    def unpin(self) -> None:
        self.pinned, self._rollback = "", None
        self.hurry()

    async def roll_back(self, wanted: Rollback) -> None:
        await self.pin(f"rolled back to step {wanted.step}")
        self._rollback = wanted
        self.wished.set()

    # -- beside the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """
        consumes: the newest offer           waits for:    an offer, or a worker that lacks the live version
        produces: a live version, slots      unblocked by: the loop; a worker that joins or comes back
        """
        while True:
            await self._until_needed()
            self._has_news.clear()
            if (offered := self._newest) is not None:
                await self._send(offered)

    async def _until_needed(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            either = [
                tasks.create_task(self._has_news.wait(), name="offer"),
                tasks.create_task(self._sender.needed(self.live_version), name="newcomer"),
            ]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for one in either:
                one.cancel()

    async def _send(self, offered: PendingPush) -> None:
        self._sent, began = offered, self._now()
        record, is_new = offered.record, offered.record.version > self.live_version
        report = await self._sender.push(record)
        if is_new:
            await self._buffer.publish(self._fence, record)
        await self._sender.flip(record)
        if is_new:
            await self._buffer.release(self._fence, offered.releases)
            self.last_push = CompletedPush(record=record, report=report, waited_s=began - offered.at, at=time.time())
            self.pushes += 1
            async with self._changed:
                self.live_version = record.version
                self._changed.notify_all()
