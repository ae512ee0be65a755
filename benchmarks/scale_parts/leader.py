"""The learner of a fleet without models: takes groups, announces pushes, waits for every reply, makes versions live."""

from __future__ import annotations

import asyncio
import time

from async_rl.board.inbox import Inbox, post
from async_rl.replay_protocol import Limits
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    ParcelGroup,
    PushBegin,
    PushOffer,
    ToLearner,
    VersionLive,
)
from async_rl.transport.sending.membership import Membership
from async_rl.transport.sending.replies import Replies
from async_rl.types import VersionRecord
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from learner.reporting.fleet_metrics import FleetMetrics

CHECKPOINT_EVERY = 5
REPLIES_S = 120.0
DIGEST = "0" * 32


class Leader:
    def __init__(self, buffer: RedisBuffer, board: RedisBoard, limits: Limits, *, every_s: float, heartbeat_s: float) -> None:
        self._buffer, self._board, self._limits = buffer, board, limits
        self._every_s, self._heartbeat_s = every_s, heartbeat_s
        self._membership = Membership(board, rest_s=60.0)
        self._replies = Replies(board, self._membership)
        self.steps = self.pushes = 0
        self.push_s: list[float] = []

    async def run(self, workers: int, begun: asyncio.Event) -> None:
        """Lead `workers`; sets `begun` when the first version is live on all of them."""
        self._fence = await self._buffer.acquire("leader", self._limits)
        await self._buffer.recover(self._fence, None)
        inbox = await Inbox[ToLearner].open(self._board, TO_LEARNER, TO_LEARNER_MESSAGES, from_start=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replies.listen(inbox))
            tasks.create_task(self._hold())
            tasks.create_task(FleetMetrics(self._board).run())
            while len(await self._board.members()) < workers:  # noqa: ASYNC110  # other processes announce them
                await asyncio.sleep(0.5)
            await self._publish(0)
            begun.set()
            while True:
                due = asyncio.get_running_loop().time() + self._every_s
                await self._step()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                await self._publish(self.steps)

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._buffer.hold(self._fence)

    async def _step(self) -> None:
        step, version, size = self.steps + 1, self.steps, self._limits.groups_per_step
        while not await self._buffer.take(self._fence, step=step, version=version, num_groups=size, wait_s=5.0):
            pass
        self.steps = step
        await self._buffer.issue(self._fence, after=version)
        await self._buffer.stats()
        if step % CHECKPOINT_EVERY == 0:
            await self._buffer.position(self._fence, step)
            await self._buffer.checkpoint(self._fence, step)

    async def _publish(self, version: int) -> None:
        began = time.monotonic()
        record = VersionRecord(version=version, timeline="timeline", step=version, digest=DIGEST)
        members = await self._membership.members_behind(version)
        self._replies.start_attempt((self._fence, version), record)
        await post(self._board, TO_WORKERS, PushOffer(fence=self._fence, generation=version, to=tuple(members), record=record))
        await self._replies.wait_until(lambda: self._replies.all_answered(members), REPLIES_S)
        await post(
            self._board,
            TO_WORKERS,
            PushBegin(
                fence=self._fence,
                generation=version,
                members=tuple(members),
                groups=(ParcelGroup(parcel=0, group="group", members=tuple(members), base=-1),),
                backend="gloo",
                transfer_bytes=0,
            ),
        )
        await self._replies.wait_until(lambda: self._replies.all_reported(members), REPLIES_S)
        await self._buffer.publish(self._fence, record)
        await post(self._board, TO_WORKERS, VersionLive(fence=self._fence, record=record))
        if version:
            await self._buffer.release(self._fence, version)
        self.push_s.append(time.monotonic() - began)
        self.pushes += 1

    @property
    def groups(self) -> int:
        """Groups taken."""
        return self.steps * self._limits.groups_per_step
