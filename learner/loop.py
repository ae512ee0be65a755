"""The finite clock of a run.

          take, pack                 step               pack          offer
    buffer ────────▶ StepBatch(n+1) ┄┄▶ StepBatch(n) ──▶ weights ──────▶ parcels ──────▶ publisher ──▶ workers
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
from pathlib import Path
from typing import Protocol

import structlog

from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import Diverged
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import VersionRecord
from learner.batches.batch import PackedBatch
from learner.checkpoints.schedule import CheckpointSaver, CheckpointSchedule
from learner.prefetch import Prefetcher, StepBatch
from learner.progress import Progress
from learner.step import StepResult
from learner.versions.publish import Publisher, Rollback

define("learner.trained", "learner.issued", "learner.recorded", "learner.offered")

log = structlog.get_logger()


class LearnerRanks(CheckpointSaver, Protocol):
    """All learner ranks at once, as rank 0 sees them; every method blocks, so the loop awaits them on one thread."""

    async def step(self, batch: PackedBatch) -> StepResult: ...

    async def pack(self, version: int, keep: Collection[int]) -> str: ...

    async def pack_stored(self, version: int, keep: Collection[int], checkpoint: Path) -> str | None:
        """Its weights instead of those of now; None when they cannot be read."""
        ...

    async def idle(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedStep:
    """What one turn of the loop did: all that a report needs."""

    progress: Progress
    step_batch: StepBatch
    result: StepResult
    step_s: float
    idle_s: float
    """How long the trainer had nothing to do before this step."""
    checkpoint: Mapping[str, float]
    """Metrics of the last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    steps: int
    checkpoint_every: int
    max_bad_steps: int
    disk_wait_s: float


class Loop:
    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        trainer: LearnerRanks,
        prefetcher: Prefetcher,
        publisher: Publisher,
        schedule: LoopSettings,
        record: Callable[[Progress, StepBatch], Awaitable[None]],
        record_rollback: Callable[[VersionRecord, int], Awaitable[None]],
        report: Callable[[FinishedStep], Awaitable[None]],
        stop: asyncio.Event,
    ):
        self._buffer, self._fence = buffer, fence
        self._trainer, self._prefetcher, self._publisher = trainer, prefetcher, publisher
        self._schedule, self._stop = schedule, stop
        self._record, self._record_rollback, self._report = record, record_rollback, report
        self._checkpoints = CheckpointSchedule(
            buffer=buffer, fence=fence, saver=trainer, publisher=publisher, disk_wait_s=schedule.disk_wait_s
        )
        self._bad_steps = 0

    async def run(self, progress: Progress) -> Progress:
        """
        consumes: groups (prefetcher.next)          waits for:    groups_per_step groups within max_age
        produces: versions (publisher.offer)  unblocked by: a worker's commit; a lease that runs out; a wish; `stop`
        """
        self._checkpoints.saved_step = progress.step
        self._publisher.reached = progress
        await self._offer(progress)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop.wait(), name="stop")
            prefetch = tasks.create_task(self._prefetcher.fetch(progress.step + 1, progress.version), name="prefetch")
            while progress.step < self._schedule.steps:
                idle_since = time.monotonic()
                while not await self._is_served(prefetch, stopping, progress, tasks):
                    held, progress = progress, await self._grant(progress)
                    if progress != held:
                        prefetch = await self._prefetch_again(prefetch, progress, tasks)
                if self._stop.is_set():
                    break
                idle_s, step_batch = time.monotonic() - idle_since, prefetch.result()
                if step_batch.step < self._schedule.steps:
                    prefetch = tasks.create_task(
                        self._prefetcher.fetch(step_batch.step + 1, progress.version + 1), name="prefetch"
                    )
                trained = progress.version
                progress = await self._train(progress, step_batch, idle_s)
                if progress.version == trained and not prefetch.done():  # skipped: the next batch trains these very weights
                    prefetch = await self._prefetch_again(prefetch, progress, tasks)
                if progress.step % self._schedule.checkpoint_every == 0:
                    await self._save(progress, tasks)
            prefetch.cancel()
            stopping.cancel()
            await asyncio.wait([prefetch])
            await self._offer(progress)
            await self._checkpoints.finish(progress, tasks)
        return progress

    async def _is_served(
        self, prefetch: asyncio.Task[StepBatch], stopping: asyncio.Task[bool], progress: Progress, tasks: asyncio.TaskGroup
    ) -> bool:
        """True with the next step_batch on the table or when the run is to stop, False with a wish to be granted.

        Meanwhile a person hears what is missing, and the other ranks that all is well: else a collective would time out.
        """
        wished = tasks.create_task(self._publisher.wished.wait(), name="wish")
        any_of = [prefetch, stopping, wished]
        while not (await asyncio.wait(any_of, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._trainer.idle()
            stats = await self._buffer.stats()
            log.info(f"waits for rollouts: {await self._prefetcher.describe_wait()}{self._publisher.remark}")
            if stats.starving:  # what was trained keeps the memory that the next batch needs
                await self._save(progress, tasks)
            if stats.reserved == 0:  # perhaps the slots that it needs hang on a version that is held back
                await self._offer(progress)
        wished.cancel()
        return stopping.done() or not self._publisher.wished.is_set()

    async def _prefetch_again(
        self, prefetch: asyncio.Task[StepBatch], progress: Progress, tasks: asyncio.TaskGroup
    ) -> asyncio.Task[StepBatch]:
        """The next batch trains weights of another number than it was asked for."""
        prefetch.cancel()
        await asyncio.wait([prefetch])
        return tasks.create_task(self._prefetcher.fetch(progress.step + 1, progress.version), name="prefetch")

    async def _train(self, progress: Progress, step_batch: StepBatch, idle_s: float) -> Progress:
        started = time.monotonic()
        result = await self._trainer.step(step_batch.packed)
        failpoint("learner.trained")
        if result.skipped:
            progress = await self._skip(progress, step_batch)
        else:
            self._bad_steps = 0
            version = await self._buffer.issue(self._fence, after=progress.version)
            failpoint("learner.issued")
            self._publisher.reached = progress = replace(progress, step=step_batch.step, version=version)
            await self._record(
                progress, step_batch
            )  # before anybody can see the version: so that none is used twice, whatever Redis loses
            failpoint("learner.recorded")
            if self._publisher.is_due:
                await self._offer(progress)
            failpoint("learner.offered")
        step_s = time.monotonic() - started
        finished = FinishedStep(
            progress=progress,
            step_batch=step_batch,
            result=result,
            step_s=step_s,
            idle_s=idle_s,
            checkpoint=self._checkpoints.row(),
        )
        await self._report(finished)
        return progress

    async def _skip(self, progress: Progress, step_batch: StepBatch) -> Progress:
        """A step that was not finite changes no weights: it makes no version, and its groups give their slots back."""
        self._bad_steps += 1
        if self._bad_steps >= self._schedule.max_bad_steps:
            raise Diverged(
                f"{self._bad_steps} steps in a row had a loss or gradient that is not finite, the last one step "
                f"{step_batch.step}; lower learner.optimizer.learning_rate, or resume from an older checkpoint"
            )
        log.warning(f"step {step_batch.step} skipped: its loss or gradient is not finite")
        await self._offer(progress)  # the slots of the skipped step return only with these weights
        if await self._publisher.until_live(progress.version):
            await self._buffer.release(self._fence, step_batch.step)
        self._publisher.reached = progress = replace(progress, step=step_batch.step)
        await self._record(progress, step_batch)
        return progress

    async def _save(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        await self._offer(progress)  # what a checkpoint contains is spent once its weights are live
        await self._checkpoints.begin(progress, tasks)

    async def _offer(self, progress: Progress) -> None:
        """Unless it was, or everything is held back."""
        if self._publisher.is_held_back:
            digest = await self._trainer.pack(progress.version, self._publisher.needed)
            record = VersionRecord(version=progress.version, timeline=progress.timeline, step=progress.step, digest=digest)
            self._publisher.offer(record, releases=progress.step)

    async def _grant(self, progress: Progress) -> Progress:
        """What somebody wished of the publisher."""
        self._publisher.wished.clear()
        if (wanted := self._publisher.take_rollback()) is not None:
            self._publisher.reached = progress = await self._roll_back(progress, wanted)
        if self._publisher.is_due:
            await self._offer(progress)
        return progress

    async def _roll_back(self, progress: Progress, wanted: Rollback) -> Progress:
        """Its weights go out under a number above all others, as versions never go back; and what is trained here gets one
        above that: so that no group is younger than the weights that it trains.
        """
        version = await self._buffer.issue(self._fence, after=progress.version)
        digest = await self._trainer.pack_stored(version, self._publisher.needed, wanted.checkpoint)
        if digest is None:
            log.error(f"{wanted.checkpoint} cannot be read, so there is no rollback to it; the weights stay pinned")
            return progress
        renumbered = replace(progress, version=await self._buffer.issue(self._fence, after=version))
        record = VersionRecord(version=version, timeline=progress.timeline, step=wanted.step, digest=digest)
        await self._record_rollback(record, renumbered.version)  # as every version: before anybody can see it
        # The weights learned from here on are one version newer, so all but the slots of one step return.
        self._publisher.offer(record, releases=progress.step - 1)
        return renumbered


IDLE_S = 5.0
