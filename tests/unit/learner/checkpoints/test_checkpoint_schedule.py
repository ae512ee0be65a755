"""Checkpoints beside the training: what waits for a disk, what does not, and what a disk that fails costs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from async_rl.errors import CheckpointError, FenceLost, find_async_rl_error
from async_rl.telemetry.table import find_metric
from async_rl.types import BufferPosition
from buffer.reference.memory_buffer import MemoryBuffer
from learner.batches.batch import PackedBatch
from learner.checkpoints.writing import Written
from learner.loop import FinishedStep
from learner.progress import Progress
from learner.step import StepResult
from tests.unit.learner.test_loop import STEPS, FakeRanks, a_loop

Answer = Written | Exception
DURABLE = Written(bytes=10, seconds=2.0)
FULL = CheckpointError("no space left")
GROUPS_PER_STEP = 2


class Disk(FakeRanks):
    """A saver whose checkpoints end when and how the test says."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.saved: list[int] = []
        self._answers, self._told = deque(answers), asyncio.Condition()
        self._trained = 0

    async def step(self, batch: PackedBatch) -> StepResult:
        async with self._told:
            self._trained += 1
            self._told.notify_all()
        return await super().step(batch)

    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        assert position.step == progress.step
        self.saved.append(progress.step)
        return self._answer()

    async def _answer(self) -> Written:
        async with self._told:
            await self._told.wait_for(lambda: len(self._answers) > 0)
            answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def answers(self, *answers: Answer) -> None:
        async with self._told:
            self._answers.extend(answers)
            self._told.notify_all()

    async def until_trained(self, steps: int) -> None:
        async with self._told:
            await self._told.wait_for(lambda: self._trained >= steps)


@pytest.fixture
def buffer() -> MemoryBuffer:
    return MemoryBuffer()


async def spent_steps(buffer: MemoryBuffer) -> int:
    return (await buffer.stats()).spent // GROUPS_PER_STEP


async def run(buffer: MemoryBuffer, disk: Disk, *, checkpoint_every: int, disk_wait_s: float = 0) -> list[FinishedStep]:
    done: list[FinishedStep] = []
    async with a_loop(buffer, done, trainer=disk, checkpoint_every=checkpoint_every, disk_wait_s=disk_wait_s) as (loop, start):
        await loop.run(start)
    return done


async def test_training_continues_during_one_checkpoint_and_waits_before_a_second(buffer: MemoryBuffer):
    disk = Disk()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(buffer, disk, checkpoint_every=2))
        await disk.until_trained(4)
        assert (disk.saved, await spent_steps(buffer)) == ([2], 0), "nothing is spent before the disk says so"
        await disk.answers(DURABLE)
        await disk.until_trained(5)
        assert (disk.saved, await spent_steps(buffer)) == ([2, 4], 2)
        await disk.answers(DURABLE, DURABLE)
    assert disk.saved == [2, 4, STEPS]
    assert await spent_steps(buffer) == STEPS
    metrics = running.result()[-1].checkpoint
    assert (metrics["checkpoint/write_s"], metrics["checkpoint/bytes"], metrics["checkpoint/failed"]) == (2.0, 10.0, 0.0)
    assert all(find_metric(name) is not None for name in metrics)


async def test_the_next_checkpoint_covers_a_failed_one(buffer: MemoryBuffer):
    disk = Disk(FULL, FULL, DURABLE)
    done = await run(buffer, disk, checkpoint_every=2)
    assert disk.saved == [2, 4, STEPS]
    assert done[-1].checkpoint["checkpoint/failed"] == 2.0
    assert await spent_steps(buffer) == STEPS
    assert (await buffer.audit()).is_clean


@pytest.mark.parametrize(("answers", "saved"), [((FULL, FULL, FULL), [1, 2, 3]), ((DURABLE, FULL), [4, STEPS])])
async def test_a_disk_that_stays_full_ends_the_run(buffer: MemoryBuffer, answers: tuple[Answer, ...], saved: list[int]):
    """Three failures in a row, or a failure of the run's last checkpoint."""
    disk = Disk(*answers)
    with pytest.raises(ExceptionGroup) as caught:
        await run(buffer, disk, checkpoint_every=saved[0])
    assert find_async_rl_error(caught.value) is FULL
    assert disk.saved == saved
    assert (await buffer.audit()).is_clean


@pytest.mark.parametrize(
    ("answers", "every", "saved"),
    [((FULL, FULL, FULL, FULL, DURABLE, DURABLE), 1, [1, 2, 3, 4, 4, 5]), ((FULL, DURABLE), STEPS, [STEPS] * 2)],
)
async def test_training_waits_for_a_disk_that_was_full_for_long(buffer: MemoryBuffer, answers, every: int, saved: list[int]):
    disk = Disk(*answers)
    await run(buffer, disk, checkpoint_every=every, disk_wait_s=60)
    assert disk.saved == saved
    assert await spent_steps(buffer) == STEPS


async def test_a_learner_that_lost_the_run_learns_it_from_its_checkpoint(buffer: MemoryBuffer):
    disk = Disk(FenceLost("a newer learner took over"))
    with pytest.raises(ExceptionGroup) as caught:
        await run(buffer, disk, checkpoint_every=2)
    assert isinstance(find_async_rl_error(caught.value), FenceLost)
    assert await spent_steps(buffer) == 0
