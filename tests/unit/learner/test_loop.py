"""The learner's loop over the reference buffer: a step that is skipped must not starve those after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import BatchConfig
from async_rl.config.buffer import StalenessConfig
from async_rl.config.learner import LearnerConfig
from async_rl.replay_protocol import BufferStats, CommitResult
from async_rl.transport.sending.sender import PushReport
from async_rl.types import BufferPosition, RolloutGroup, Ticket, VersionRecord
from buffer.reference.memory_buffer import MemoryBuffer
from learner.batches.batch import PackedBatch, pack_batch
from learner.checkpoints.writing import Written
from learner.loop import FinishedStep, Loop
from learner.objective import load_objective
from learner.prefetch import Prefetcher
from learner.progress import Progress
from learner.step import StepResult
from learner.versions.publish import Publisher
from learner.versions.push_policy import PushPolicy
from tests.support.groups import group
from tests.support.runs import limits
from tests.support.waiting import eventually

EVERY_STEP = PushPolicy()
SKIPPED = 2
STEPS = 5


def known(digest: str) -> Future[str]:
    """A digest that is computed already."""
    future: Future[str] = Future()
    future.set_result(digest)
    return future


class FakeRanks:
    """Trains nothing; its second step is not finite."""

    def __init__(self) -> None:
        self._steps = 0

    async def step(self, batch: PackedBatch) -> StepResult:
        self._steps += 1
        return StepResult(loss=0.0, grad_norm=0.0, learning_rate=0.0, skipped=self._steps == SKIPPED, metrics={})

    async def pack_version(self, version: int, keep: Collection[int]) -> Future[str]:
        return known("digest")

    async def pack_checkpoint(self, version: int, keep: Collection[int], checkpoint: Path) -> Future[str] | None:
        return known(f"digest of {checkpoint.name}")

    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        return self._written(still_ours)

    async def _written(self, still_ours: Callable[[], Awaitable[None]]) -> Written:
        await still_ours()
        return Written(bytes=0, seconds=0.0)

    async def idle(self) -> None: ...


class Sound(FakeRanks):
    async def step(self, batch: PackedBatch) -> StepResult:
        return replace(await super().step(batch), skipped=False)


class NoWorkers:
    async def wait_for_members_behind(self, version: int) -> list[str]:
        return await asyncio.Future()

    async def push(self, record: VersionRecord) -> PushReport:
        return PushReport(staged=(), dropped={}, how={}, num_bytes=0, seconds=0.0)

    async def flip(self, record: VersionRecord) -> None: ...


async def roll_out(buffer: MemoryBuffer) -> None:
    while True:
        live = (await buffer.stats()).version
        for ticket in await buffer.reserve("w", version=live, count=2, wait_s=0.05):
            await buffer.commit("w", group(ticket))


class FullServer(MemoryBuffer):
    """Has room for the payloads of two steps; commits beyond that wait for a checkpoint."""

    async def stats(self) -> BufferStats:
        stats = await super().stats()
        return replace(stats, starving=stats.taken >= 4)

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        while (await self.stats()).starving:
            await self._change(0.5)
        return await super().commit(worker, group, keep=keep)


@asynccontextmanager
async def a_loop(
    buffer: MemoryBuffer,
    done: list[FinishedStep],
    *,
    max_age: float = 2,
    trainer: FakeRanks | None = None,
    checkpoint_every: int = 100,
    disk_wait_s: float = 0,
    policy: PushPolicy = EVERY_STEP,
    meddle: Callable[[Publisher, asyncio.Event], Awaitable[None]] | None = None,
    **in_force: object,
) -> AsyncIterator[tuple[Loop, Progress]]:
    """A loop with a worker, a publisher and a meddler beside it. By default it never writes a checkpoint."""
    fence = await buffer.acquire("learner", limits(max_age=max_age, **in_force))
    await buffer.recover(fence, None)
    sender: Any = NoWorkers()
    publisher = Publisher(buffer=buffer, fence=fence, sender=sender, policy=policy)
    prefetcher = Prefetcher(
        buffer=buffer,
        fence=fence,
        batch=BatchConfig(groups_per_step=2, group_size=2),
        staleness=StalenessConfig(max_age=max_age),
        pack=partial(pack_batch, objective=load_objective("async_default"), capacity=BatchConfig().bin_tokens),
        num_workers=lambda: 1,
    )

    async def report(finished: FinishedStep) -> None:
        done.append(finished)

    async def written(*_row: object) -> None:
        pass

    loop = Loop(
        buffer=buffer,
        fence=fence,
        ranks=trainer if trainer is not None else FakeRanks(),
        prefetcher=prefetcher,
        publisher=publisher,
        config=LearnerConfig(steps=STEPS, checkpoint_every=checkpoint_every, max_bad_steps=3, disk_wait_s=disk_wait_s),
        record=written,
        record_rollback=written,
        report=report,
        make_room=lambda: buffer.set_limit(fence, "pace", max_age + 1),
        stop=(stop := asyncio.Event()),
    )

    async def meddler() -> None:
        if meddle is not None:
            await meddle(publisher, stop)

    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(each) for each in (roll_out(buffer), publisher.run(), meddler())]
        yield loop, Progress(step=0, version=await buffer.issue(fence, after=-1), timeline="t")
        for task in beside:
            task.cancel()


@pytest.mark.parametrize("max_age", [0, 1, 2])
async def test_a_skipped_step_is_followed_by_others(max_age: int):
    buffer, done = MemoryBuffer(), list[FinishedStep]()
    async with a_loop(buffer, done, max_age=max_age) as (loop, start):
        end = await loop.run(start)
    assert end.step == STEPS
    assert end.version == start.version + STEPS - 1, "a skipped step makes no version"
    assert all(taken.age <= max_age for finished in done for taken in finished.step_batch.groups)
    assert (await buffer.audit()).is_clean


class TwoEnvironments(MemoryBuffer):
    """The groups of one environment come before those of the other; no group is rolled out before `may_begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = asyncio.Event()

    async def reserve(self, *given: Any, **more: Any) -> list[Ticket]:
        await self.may_begin.wait()
        return await super().reserve(*given, **more)

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        environment = "abaabbabab"[int(group.task.key[1:])]
        return await super().commit(worker, replace(group, task=replace(group.task, environment=environment)), keep=keep)


async def test_ready_groups_that_do_not_fit_the_batch_do_not_stop_a_learner_of_a_low_pace(monkeypatch: pytest.MonkeyPatch):
    """While the weights are pinned every trained group keeps its slot, and a share keeps ready ones out of the batch."""
    monkeypatch.setattr("learner.loop.IDLE_S", 0.1)
    buffer, done = TwoEnvironments(), list[FinishedStep]()

    async def is_live() -> bool:
        return (await buffer.stats()).version >= 0

    async def pin(publisher: Publisher, _stop: asyncio.Event) -> None:
        await eventually(is_live, "the first version is live")
        await publisher.pin("a test")
        buffer.may_begin.set()

    shares = {"a": 1, "b": 1}
    async with a_loop(buffer, done, max_age=STEPS - 1, trainer=Sound(), meddle=pin, quotas=shares, pace=2) as (loop, start):
        await loop.run(start)
    assert len(done) == STEPS


async def test_a_full_server_makes_the_loop_save_early():
    buffer = FullServer()
    async with a_loop(buffer, []) as (loop, start):
        end = await loop.run(start)
    assert end.step == STEPS


class SlowDigests(Sound):
    """The digest of the version that the first step makes is known once the third step has begun."""

    def __init__(self) -> None:
        super().__init__()
        self._late: Future[str] = Future()
        self._num_packed = 0

    async def step(self, batch: PackedBatch) -> StepResult:
        result = await super().step(batch)
        if self._steps == 3:
            self._late.set_result("digest")
        return result

    async def pack_version(self, version: int, keep: Collection[int]) -> Future[str]:
        self._num_packed += 1
        return self._late if self._num_packed == 2 else await super().pack_version(version, keep)


async def test_steps_do_not_wait_for_digests():
    buffer, done = MemoryBuffer(), list[FinishedStep]()
    async with a_loop(buffer, done, max_age=2, trainer=SlowDigests()) as (loop, start):
        end = await loop.run(start)
    assert (end.step, end.version) == (STEPS, start.version + STEPS)
    assert (await buffer.audit()).is_clean
