"""When a version goes out, and what must have happened before it is live.

    offer(version) ──▶ push to every member ──▶ all staged ──▶ buffer.publish ──▶ flip ──▶ buffer.release(slots)

The loop only offers what it has packed; pushing happens beside the next step. When the fleet is slower than the learner,
versions in between are skipped: the age bound stays true, because slots return only with the version that goes live.
"""

from __future__ import annotations

import asyncio

from async_rl.replay_protocol import ReplayBuffer
from async_rl.transport.sender import PushReport, WeightSender
from async_rl.types import VersionRecord


class Publisher:
    def __init__(self, *, buffer: ReplayBuffer, fence: int, sender: WeightSender):
        self._buffer, self._fence, self._sender = buffer, fence, sender
        self._newest: VersionRecord | None = None
        self._under_way: VersionRecord | None = None
        self._offered = asyncio.Event()
        self._went_live = asyncio.Condition()
        self.live_version = -1
        self.last_push: PushReport | None = None
        """Of the live version to the workers that were there when it went live."""

    @property
    def needed(self) -> set[int]:
        """The versions that may still be sent: the newest, to whoever joins, and the one under way."""
        return {record.version for record in (self._newest, self._under_way) if record is not None}

    def offer(self, record: VersionRecord) -> None:
        """Its weights are packed. It takes the place of one that nobody has begun to push."""
        self._newest = record
        self._offered.set()

    async def until_live(self, version: int) -> None:
        async with self._went_live:
            await self._went_live.wait_for(lambda: self.live_version >= version)

    async def run(self) -> None:
        """
        consumes: the newest offer           waits for:    an offer, or a worker that lacks the live version
        produces: a live version, slots      unblocked by: the loop; a worker that joins or comes back
        """
        while True:
            await self._until_needed()
            self._offered.clear()
            if (record := self._newest) is not None:
                await self._send(record)

    async def _until_needed(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            either = [
                tasks.create_task(self._offered.wait(), name="offer"),
                tasks.create_task(self._sender.needed(self.live_version), name="newcomer"),
            ]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for one in either:
                one.cancel()

    async def _send(self, record: VersionRecord) -> None:
        self._under_way = record
        is_new = record.version > self.live_version
        pushed = await self._sender.push(record)
        if is_new:
            await self._buffer.publish(self._fence, record)
        await self._sender.flip(record)
        if is_new:
            await self._buffer.release(self._fence, record.step)
            self.last_push = pushed
            async with self._went_live:
                self.live_version = record.version
                self._went_live.notify_all()
