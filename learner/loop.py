"""The finite clock of a run.

          take, pack                 step               pack          offer
    buffer ────────▶ Meal(n+1) ┄┄▶ Meal(n) ──▶ weights ──────▶ parcels ──────▶ publisher ──▶ workers
       ▲            (while n computes)    │                                       │
       └─────────── checkpoint: spent ◀───┘                   release: slots ◀────┘

Everything that decides is elsewhere and pure; this file only keeps the order in which things become true:
a version is issued before anybody can see it, a group is spent only when a durable checkpoint contains it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from async_rl.errors import Diverged
from async_rl.failpoints import define, failpoint
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import VersionRecord
from learner.batch import PackedBatch
from learner.feed import Feed, Meal
from learner.progress import Progress
from learner.publish import Publisher
from learner.saves import Saver, Saves
from learner.step import StepResult

define("learner.trained", "learner.issued", "learner.recorded", "learner.offered")

log = structlog.get_logger()


class Trainer(Saver, Protocol):
    """All learner ranks at once, as rank 0 sees them; every method blocks, so the loop awaits them on one thread."""

    async def step(self, batch: PackedBatch) -> StepResult: ...

    async def pack(self, version: int, keep: Collection[int]) -> str: ...

    async def idle(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped:
    """What one turn of the loop did: all that a report needs."""

    progress: Progress
    meal: Meal
    result: StepResult
    step_s: float
    idle_s: float
    """How long the trainer had nothing to do before this step."""
    checkpoint: Mapping[str, float]
    """Metrics of the last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int
    checkpoint_every: int
    max_bad_steps: int


class Loop:
    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        trainer: Trainer,
        feed: Feed,
        publisher: Publisher,
        schedule: Schedule,
        record: Callable[[Progress, Meal], None],
        report: Callable[[Stepped], Awaitable[None]],
        stop: asyncio.Event,
    ):
        self._buffer, self._fence = buffer, fence
        self._trainer, self._feed, self._publisher = trainer, feed, publisher
        self._schedule, self._stop = schedule, stop
        self._record, self._report = record, report
        self._saves = Saves(buffer=buffer, fence=fence, saver=trainer, publisher=publisher)
        self._bad_steps = 0

    async def run(self, progress: Progress) -> Progress:
        """
        consumes: groups (feed.next)          waits for:    groups_per_step groups within max_age
        produces: versions (publisher.offer)  unblocked by: a worker's commit; a lease that runs out; `stop`
        """
        self._saves.saved_step = progress.step
        await self._offer(progress)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop.wait(), name="stop")
            upcoming = tasks.create_task(self._feed.next(progress.step + 1, progress.version), name="feed")
            while progress.step < self._schedule.steps:
                idle_since = time.monotonic()
                if not await self._is_served(upcoming, stopping, progress, tasks):
                    break
                idle_s, meal = time.monotonic() - idle_since, upcoming.result()
                if meal.step < self._schedule.steps:
                    upcoming = tasks.create_task(self._feed.next(meal.step + 1, progress.version + 1), name="feed")
                trained = progress.version
                progress = await self._train(progress, meal, idle_s)
                if progress.version == trained and not upcoming.done():  # skipped: the next batch trains these very weights
                    upcoming.cancel()
                    await asyncio.wait([upcoming])
                    upcoming = tasks.create_task(self._feed.next(meal.step + 1, progress.version), name="feed")
                if progress.step % self._schedule.checkpoint_every == 0:
                    await self._saves.begin(progress, tasks)
            upcoming.cancel()
            stopping.cancel()
            await asyncio.wait([upcoming])
            await self._saves.finish(progress, tasks)
        return progress

    async def _is_served(
        self, upcoming: asyncio.Task[Meal], stopping: asyncio.Task[bool], progress: Progress, tasks: asyncio.TaskGroup
    ) -> bool:
        """True with the next meal on the table, False when the run is to stop.

        Meanwhile a person hears what is missing, and the other ranks that all is well: else a collective would time out.
        """
        while not (await asyncio.wait([upcoming, stopping], timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._trainer.idle()
            log.info(f"waits for rollouts: {await self._feed.what_is_missing()}")
            if (await self._buffer.stats()).starving:  # what was trained keeps the memory that the next batch needs
                await self._saves.begin(progress, tasks)
        return not self._stop.is_set()

    async def _train(self, progress: Progress, meal: Meal, idle_s: float) -> Progress:
        started = time.monotonic()
        result = await self._trainer.step(meal.batch)
        failpoint("learner.trained")
        if result.skipped:
            progress = await self._skip(progress, meal)
        else:
            self._bad_steps = 0
            version = await self._buffer.issue(self._fence, after=progress.version)
            failpoint("learner.issued")
            progress = replace(progress, step=meal.step, version=version)
            self._record(progress, meal)  # before anybody can see the version: so that none is used twice, whatever Redis loses
            failpoint("learner.recorded")
            await self._offer(progress)
            failpoint("learner.offered")
        step_s = time.monotonic() - started
        stepped = Stepped(
            progress=progress, meal=meal, result=result, step_s=step_s, idle_s=idle_s, checkpoint=self._saves.row()
        )
        await self._report(stepped)
        return progress

    async def _skip(self, progress: Progress, meal: Meal) -> Progress:
        """A step that was not finite changes no weights: it makes no version, and its groups give their slots back."""
        self._bad_steps += 1
        if self._bad_steps >= self._schedule.max_bad_steps:
            raise Diverged(
                f"{self._bad_steps} steps in a row had a loss or gradient that is not finite, the last one step {meal.step}; "
                "lower learner.optimizer.learning_rate, or resume from an older checkpoint"
            )
        log.warning(f"step {meal.step} skipped: its loss or gradient is not finite")
        await self._publisher.until_live(progress.version)
        await self._buffer.release(self._fence, meal.step)
        progress = replace(progress, step=meal.step)
        self._record(progress, meal)
        return progress

    async def _offer(self, progress: Progress) -> None:
        digest = await self._trainer.pack(progress.version, self._publisher.needed)
        record = VersionRecord(version=progress.version, timeline=progress.timeline, step=progress.step, digest=digest)
        self._publisher.offer(record)


IDLE_S = 5.0
