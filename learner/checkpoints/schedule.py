"""The learner's checkpoints as its loop sees them: begun between two steps, completed while training goes on.

    loop          position, copies ──▶ next steps ...
    background                └──▶ files durable ──▶ version live ──▶ groups spent

While the disk refuses a checkpoint its groups stay unspent, and the next checkpoint covers them. After FAILURES_IN_A_ROW
failures training pauses until a checkpoint is written, or the run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
"""Failed checkpoints until training pauses: with each, a crash would lose more, and the buffer holds more groups."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Pause between two attempts while training is paused; it doubles from FIRST_PAUSE_S."""

log = structlog.get_logger()


class CheckpointSaver(Protocol):
    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        """Begin a checkpoint; return when training may continue. The returned awaitable ends when it is durable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is durable."""

    step: int
    seconds: float
    """From the copies until it was durable."""
    bytes: int
    stall_s: float
    """Time that it blocked training."""


class CheckpointSchedule:
    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        saver: CheckpointSaver,
        publisher: Publisher,
        disk_wait_s: float,
        on_saved: Callable[[SavedCheckpoint], None] = lambda _: None,
    ):
        """`disk_wait_s`: how long training pauses for a disk that refuses checkpoints. `on_saved`: told of durable ones."""
        self._disk_wait_s, self._on_saved = disk_wait_s, on_saved
        self._buffer, self._fence = buffer, fence
        self._saver, self._publisher = saver, publisher
        self.saved_step = -1
        """Step of the newest checkpoint, which may still be under way; -1 if there is none or it failed."""
        self._under_way: asyncio.Task[None] | None = None
        self._failures: list[CheckpointError] = []
        """Failures since the last success."""
        self._row = {"checkpoint/failed": 0.0}

    def row(self) -> dict[str, float]:
        """Metrics of the last checkpoint (`checkpoint/...`)."""
        return dict(self._row)

    async def begin(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        """Begin a checkpoint and return when training may continue.

        Waits for the previous checkpoint, and while too many failed in a row. Raises CheckpointError when the disk refused
        checkpoints for longer than `disk_wait_s`.
        """
        since = time.monotonic()
        await self._settled()
        if len(self._failures) >= FAILURES_IN_A_ROW:
            await self._insist(progress, tasks)
        elif progress.step != self.saved_step:
            await self._save(progress, tasks)
            self._row["checkpoint/stall_s"] = time.monotonic() - since

    async def finish(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        """Write the last checkpoint of the run. Returns when it is durable and its groups are spent."""
        await self.begin(progress, tasks)
        await self._settled()
        if self._failures:
            await self._insist(progress, tasks)

    async def _insist(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        since, pause_s = time.monotonic(), FIRST_PAUSE_S
        log.warning(f"training is paused until a checkpoint of step {progress.step} is written: {self._failures[-1]}")
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
        """Wait for the checkpoint under way; its exception goes to the task group."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def _settle(self, progress: Progress, written: Awaitable[Written]) -> None:
        try:
            done = await written
        except CheckpointError as error:
            self._failures.append(error)
            self._row["checkpoint/failed"] += 1
            self.saved_step = -1
            if len(self._failures) <= FAILURES_IN_A_ROW:
                log.warning(f"step {progress.step} has no checkpoint: {error}")
            return
        self._failures.clear()
        self._row |= {"checkpoint/write_s": done.seconds, "checkpoint/bytes": float(done.bytes)}
        stall_s = self._row.get("checkpoint/stall_s", 0.0)
        self._on_saved(SavedCheckpoint(step=progress.step, seconds=done.seconds, bytes=done.bytes, stall_s=stall_s))
        failpoint("learner.durable")
        # Spending a group frees its slot, which is allowed only once the version trained on it is live.
        if await self._publisher.until_live(progress.version):  # else the next checkpoint, or recovery, covers them
            await self._buffer.checkpoint(self._fence, progress.step)
            failpoint("learner.spent")
