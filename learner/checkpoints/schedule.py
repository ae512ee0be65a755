"""The checkpoints of one learner's life, as its loop sees them: begun between two steps, made to count beside the next ones.

    loop      position, copies ──▶ trains on ...
    beside               └──▶ files durable ──▶ version live ──▶ groups spent

A disk may be full for a while: then groups stay unspent, and the next checkpoint takes them along. When it stays full, training
stands still until a checkpoint is written, or the run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import CheckpointError
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition
from learner.checkpoints.writing import Written
from learner.progress import Progress
from learner.versions.publish import Publisher

define("learner.copied", "learner.durable", "learner.spent")

FAILURES_IN_A_ROW = 3
"""Stop the training. What a crash would lose grows with each of them, and so does what the buffer must keep."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Between two attempts while training stands still."""

log = structlog.get_logger()


class CheckpointSaver(Protocol):
    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        """Returns when training may go on. What it returns is done when the checkpoint is durable."""
        ...


class CheckpointSchedule:
    def __init__(self, *, buffer: ReplayBuffer, fence: int, saver: CheckpointSaver, publisher: Publisher, disk_wait_s: float):
        """`disk_wait_s` is how long training stands still for a disk that refuses."""
        self._disk_wait_s = disk_wait_s
        self._buffer, self._fence = buffer, fence
        self._saver, self._publisher = saver, publisher
        self.saved_step = -1
        """Of the newest checkpoint, which may still be under way."""
        self._under_way: asyncio.Task[None] | None = None
        self._failures: list[CheckpointError] = []
        """Since the last one that succeeded."""
        self._row = {"checkpoint/failed": 0.0}

    def row(self) -> dict[str, float]:
        """Metrics, mostly of the last checkpoint."""
        return dict(self._row)

    async def begin(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        """Returns when training may go on: soon, unless the checkpoint before this one is still under way, or too many failed.

        Raises CheckpointError when the disk has refused them for too long.
        """
        since = time.monotonic()
        await self._settled()
        if len(self._failures) >= FAILURES_IN_A_ROW:
            await self._insist(progress, tasks)
        elif progress.step != self.saved_step:
            await self._save(progress, tasks)
            self._row["checkpoint/stall_s"] = time.monotonic() - since

    async def finish(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        """The last one, which nothing can make up for. Returns when it counts."""
        await self.begin(progress, tasks)
        await self._settled()
        if self._failures:
            await self._insist(progress, tasks)

    async def _insist(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        since, pause_s = time.monotonic(), FIRST_PAUSE_S
        log.warning(f"training waits until a checkpoint of step {progress.step} is written: {self._failures[-1]}")
        while self._failures:
            if (left_s := since + self._disk_wait_s - time.monotonic()) <= 0:
                raise self._failures[-1]
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await self._save(progress, tasks)
            await self._settled()
        log.info("checkpoints are written again")

    async def _save(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        position = await self._buffer.position(self._fence, progress.step)
        written = await self._saver.save(progress, position, still_ours=lambda: self._buffer.hold(self._fence))
        failpoint("learner.copied")
        self.saved_step = progress.step
        self._under_way = tasks.create_task(self._settle(progress, written), name="checkpoint")

    async def _settled(self) -> None:
        """How the one under way ends is for the task group around it."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def _settle(self, progress: Progress, written: Awaitable[Written]) -> None:
        try:
            done = await written
        except CheckpointError as error:
            self._failed(progress, error)
            return
        self._failures.clear()
        self._row |= {"checkpoint/write_s": done.seconds, "checkpoint/bytes": float(done.bytes)}
        failpoint("learner.durable")
        # A spent group holds no slot, and slots return only with the version trained on it.
        if await self._publisher.until_live(progress.version):  # else the next checkpoint, or recovery, takes them along
            await self._buffer.checkpoint(self._fence, progress.step)
            failpoint("learner.spent")

    def _failed(self, progress: Progress, error: CheckpointError) -> None:
        self._failures.append(error)
        self._row["checkpoint/failed"] += 1
        self.saved_step = -1
        if len(self._failures) <= FAILURES_IN_A_ROW:
            log.warning(f"step {progress.step} has no checkpoint: {error}")
