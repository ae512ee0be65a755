"""Decides when a version is pushed, and makes it live once its push is over.

    offer(version) ──▶ its digest ──▶ push to the members behind ──▶ buffer.publish ──▶ flip ──▶ buffer.release(slots)

A push is over when each member has staged the version or was dropped; dropped members delay nothing, they catch up.
The loop reports which weights the learner holds, packs those that are due (push_policy.py) and offers them; hashing and pushing
happen during the next step. When pushes are slower than steps, versions in between are skipped: the age bound still holds,
because slots return only with the version that goes live.

Operators may request a push, pin the live version, or have a checkpoint served instead (requests.py in this folder). A request
that needs the loop, because it packs between two steps, is pending until the loop takes it: `PushNow` or `Rollback`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from async_rl.replay_protocol import ReplayBuffer
from async_rl.transport.sending.sender import PushReport, WeightSender
from async_rl.types import VersionRecord
from learner.progress import Progress
from learner.versions.push_policy import PushPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedVersion:
    """A version whose weights are copied. Its digest is computed while training goes on (RankSender.begin_digest)."""

    version: int
    timeline: str
    step: int
    digest: Future[str]

    async def record(self) -> VersionRecord:
        """Wait for the digest. Raises WireError when a rank could not compute its part."""
        digest = await asyncio.wrap_future(self.digest)
        return VersionRecord(version=self.version, timeline=self.timeline, step=self.step, digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPush:
    """A packed version to be pushed."""

    packed: PackedVersion
    releases: int
    """The step up to which slots return when it goes live."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedPush:
    """A version that went live, and the report of its push."""

    record: VersionRecord
    report: PushReport
    waited_s: float
    """Time from its offer until its push began, its digest included."""
    at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class PushNow:
    """Push the newest weights, whatever the policy says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Serve a checkpoint's weights."""

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
        on_push: Callable[[CompletedPush], None] = lambda _: None,
    ):
        """`on_push`: told of each push that has ended, also of those that brought the live version to a worker that joined."""
        self._buffer, self._fence, self._sender = buffer, fence, sender
        self._policy, self._now, self._on_push = policy, now, on_push
        self._newest: PendingPush | None = None
        self._sent: PendingPush | None = None
        """The last version whose push began: live, or about to be."""
        self._is_replaced = False
        """Whether the newest one, whose push has not begun, is given up for the one that is being packed."""
        self._is_offered = asyncio.Event()
        self._changed = asyncio.Condition()
        self._pending: PushNow | Rollback | None = None
        """The request that the loop has not carried out yet; a newer one replaces it."""
        self.progress: Progress | None = None
        """The weights that the learner holds; updated by the loop."""
        self.has_request = asyncio.Event()
        """Wakes the loop for a new request."""
        self.live_version = -1
        self.pinned = ""
        """Why nothing newer is pushed, as operators read it; empty: no pin."""
        self.last_push: CompletedPush | None = None
        self.released_step = 0
        """The slots of the steps up to this one have returned."""
        self.num_pushes = 0
        self.num_coalesced = 0
        """Versions that were packed, and replaced by a newer one before their push began."""

    @property
    def versions_in_use(self) -> set[int]:
        """The versions that may still be sent: the newest, the one being pushed, and the live one to workers that join."""
        return {self.live_version, *(pending.packed.version for pending in (self._next, self._sent) if pending is not None)}

    def make_room(self) -> set[int]:
        """Give up a version whose push has not begun, for one that is packed now and offered next. Returns those in use."""
        self._is_replaced = self._newest is not self._sent
        return self.versions_in_use

    @property
    def _next(self) -> PendingPush | None:
        """The version to push next, or again."""
        return self._sent if self._is_replaced else self._newest

    @property
    def remark(self) -> str:
        """Appended to the line that says what the learner waits for: a pin may be the reason."""
        return f"; the weights are pinned ({self.pinned}), `async-rl weights pin off` ends it" if self.pinned else ""

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def may_offer(self) -> bool:
        """Whether the learner's newest weights were not offered yet, and nothing is pinned."""
        return self.progress is not None and not self.pinned and not self._was_offered(self.progress.version)

    @property
    def is_due(self) -> bool:
        """Whether the learner's newest weights should be packed and offered now."""
        if not self.may_offer or self._newest is None or isinstance(self._pending, PushNow):
            return self.may_offer
        assert self.progress is not None
        steps, seconds = self.progress.step - self._newest.releases, self._now() - self._newest.at
        return self._policy.is_due(steps=steps, seconds=seconds)

    def offer(self, packed: PackedVersion, *, releases: int) -> None:
        """Push a packed version next. It replaces an offered version whose push has not begun."""
        if self._newest is not self._sent:
            self.num_coalesced += 1
        if isinstance(self._pending, PushNow):
            self._pending = None
        self._newest = PendingPush(packed=packed, releases=releases, at=self._now())
        self._is_replaced = False
        self._is_offered.set()

    def take_rollback(self) -> Rollback | None:
        """The pending rollback, once. A push stays pending until it is offered; either way the loop is not woken again."""
        self.has_request.clear()
        if not isinstance(self._pending, Rollback):
            return None
        rollback, self._pending = self._pending, None
        return rollback

    async def until_live(self, version: int) -> bool:
        """Wait until the version or a newer one is live. False when it was not offered or a pin withdrew it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.live_version >= version or not self._was_offered(version))
            return self.live_version >= version

    def _was_offered(self, version: int) -> bool:
        return self._newest is not None and self._newest.packed.version >= version

    # -- operators' requests -------------------------------------------------------------------------------------------

    def request_push(self) -> None:
        """Have the loop push the weights that it holds after the current step, whatever the policy says."""
        self._request(PushNow())

    async def pin(self, why: str) -> PackedVersion | None:
        """Push nothing newer than the version that is live or being pushed. Returns this version, if there is one."""
        async with self._changed:
            self.pinned, self._newest = why, self._sent
            self._changed.notify_all()
        return self._sent.packed if self._sent is not None else None

    def unpin(self) -> None:
        """End the pin and push the newest weights; a pending rollback is dropped."""
        self.pinned = ""
        self._request(PushNow())

    async def request_rollback(self, rollback: Rollback) -> None:
        """Pin, and have the loop push a checkpoint's weights after the current step."""
        await self.pin(f"rolled back to step {rollback.step}")
        self._request(rollback)

    def _request(self, request: PushNow | Rollback) -> None:
        self._pending = request
        self.has_request.set()

    # -- beside the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """
        consumes: the newest offer           waits for:    an offer, or a worker that lacks the live version
        produces: a live version, slots      unblocked by: the loop; a worker that joins or comes back
        """
        while True:
            await self._wait_for_work()
            self._is_offered.clear()
            if (pending := self._next) is not None:
                await self._push(pending)

    async def _wait_for_work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            either = [
                tasks.create_task(self._is_offered.wait(), name="offer"),
                tasks.create_task(self._sender.wait_for_members_behind(self.live_version), name="newcomer"),
            ]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for one in either:
                one.cancel()

    async def _push(self, pending: PendingPush) -> None:
        self._sent = pending
        record = await pending.packed.record()
        began, is_new = self._now(), record.version > self.live_version
        report = await self._sender.push(record)
        if is_new:
            await self._buffer.publish(self._fence, record)
        await self._sender.flip(record)
        pushed = CompletedPush(record=record, report=report, waited_s=began - pending.at if is_new else 0.0, at=time.time())
        self._on_push(pushed)
        if is_new:
            await self._buffer.release(self._fence, pending.releases)
            self.released_step = pending.releases
            self.last_push = pushed
            self.num_pushes += 1
            async with self._changed:
                self.live_version = record.version
                self._changed.notify_all()
