"""The training loop of the learner, on rank 0: take a step batch, train, issue a version, offer it, checkpoint.

            prefetch                  step    issue, journal          pack, offer
    buffer ──────────▶ step batch n+1 ┄┄▶ n ──────────────▶ version ──────────────▶ publisher ──▶ workers
       ▲             (while n computes)   │                                            │
       └──────────── checkpoint: spent ◀──┘                        release: slots ◀────┘

This file fixes the order of effects; the decisions are made in pure functions elsewhere. A version is issued and written to
the journal before it can be seen. A group is spent once a durable checkpoint contains its step, and the checkpoint's weights
are live.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from async_rl.config.learner import LearnerConfig
from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import Diverged
from async_rl.replay_protocol import ReplayBuffer
from learner.batches.batch import PackedBatch
from learner.checkpoints.schedule import CheckpointSaver, CheckpointSchedule, SavedCheckpoint
from learner.prefetch import Prefetcher, StepBatch
from learner.progress import Progress
from learner.step import StepResult
from learner.step_clock import StepClock
from learner.versions.publish import PackedVersion, Publisher, Rollback

define("learner.trained", "learner.issued", "learner.recorded", "learner.offered")

log = structlog.get_logger()


class LearnerRanks(CheckpointSaver, Protocol):
    """The rank group as the loop uses it. Every call returns when all ranks have finished it."""

    async def step(self, batch: PackedBatch) -> StepResult: ...

    async def pack_version(self, version: int, keep: Collection[int]) -> Future[str]:
        """Copy the current weights, keeping the versions `keep`; returns their digest, which is computed meanwhile."""
        ...

    async def pack_checkpoint(self, version: int, keep: Collection[int], checkpoint: Path) -> Future[str] | None:
        """Pack the weights of a checkpoint. Returns None if the checkpoint cannot be read."""
        ...

    async def idle(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedStep:
    """The outcome of one iteration of the loop, for reports."""

    progress: Progress
    step_batch: StepBatch
    result: StepResult
    step_s: float
    idle_s: float
    """Seconds that the ranks waited for data before this step."""
    idle: Mapping[str, float]
    """Shares of the time since the last step's report, by cause (`idle/...`)."""
    checkpoint: Mapping[str, float]
    """Metrics of the last checkpoint (`checkpoint/...`)."""


class Loop:
    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        ranks: LearnerRanks,
        prefetcher: Prefetcher,
        publisher: Publisher,
        config: LearnerConfig,
        record: Callable[[Progress, StepBatch], Awaitable[None]],
        record_rollback: Callable[[PackedVersion, int], Awaitable[None]],
        report: Callable[[FinishedStep], Awaitable[None]],
        make_room: Callable[[], Awaitable[None]],
        stop: asyncio.Event,
        on_saved: Callable[[SavedCheckpoint], None] = lambda _: None,
    ):
        self._buffer, self._fence = buffer, fence
        self._ranks, self._prefetcher, self._publisher = ranks, prefetcher, publisher
        self._config, self._stop = config, stop
        self._record, self._record_rollback, self._report = record, record_rollback, report
        self._make_room = make_room
        self._checkpoints = CheckpointSchedule(
            buffer=buffer, fence=fence, saver=ranks, publisher=publisher, disk_wait_s=config.disk_wait_s, on_saved=on_saved
        )
        self._bad_steps = 0
        self._clock = StepClock()

    async def run(self, progress: Progress) -> Progress:
        """
        consumes: step batches (prefetcher)   waits for:    groups_per_step groups within max_age
        produces: versions (publisher.offer)  unblocked by: worker commit; lease expiry; operator request; `stop`
        """
        self._checkpoints.saved_step = progress.step
        self._publisher.progress, self._publisher.released_step = progress, progress.step
        await self._offer(progress)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop.wait(), name="stop")
            prefetch = tasks.create_task(self._prefetcher.fetch(progress.step + 1, progress.version), name="prefetch")
            while progress.step < self._config.steps:
                idle_since = time.monotonic()
                with self._clock.during("no_groups"):
                    while not await self._wait_for_batch(prefetch, stopping, progress, tasks):
                        before, progress = progress, await self._handle_request(progress)
                        if progress != before:
                            prefetch = await self._prefetch_again(prefetch, progress, tasks)
                if self._stop.is_set():
                    break
                idle_s, step_batch = time.monotonic() - idle_since, prefetch.result()
                if step_batch.step < self._config.steps:  # for the version that this step makes, unless it is skipped
                    prefetch = tasks.create_task(
                        self._prefetcher.fetch(step_batch.step + 1, progress.version + 1), name="prefetch"
                    )
                trained = progress.version
                progress = await self._train(progress, step_batch, idle_s)
                if progress.version == trained and not prefetch.done():  # skipped: the version stays the same
                    prefetch = await self._prefetch_again(prefetch, progress, tasks)
                if progress.step % self._config.checkpoint_every == 0:
                    await self._save(progress, tasks)
            prefetch.cancel()
            stopping.cancel()
            await asyncio.wait([prefetch])
            await self._offer(progress)
            await self._checkpoints.finish(progress, tasks)
        return progress

    async def _wait_for_batch(
        self, prefetch: asyncio.Task[StepBatch], stopping: asyncio.Task[bool], progress: Progress, tasks: asyncio.TaskGroup
    ) -> bool:
        """Wait for the next batch. Returns False if an operator request is pending, True otherwise (also when `stop` is set).

        While waiting, logs what is missing and sends the other ranks an idle order, so that their collective does not time out.
        """
        requested = tasks.create_task(self._publisher.has_request.wait(), name="request")
        any_of = [prefetch, stopping, requested]
        while not (await asyncio.wait(any_of, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._ranks.idle()
            stats = await self._buffer.stats()
            log.info(f"waits for rollouts: {await self._prefetcher.describe_wait()}{self._publisher.remark}")
            if stats.starving:  # trained groups hold the memory that the next batch needs, until a checkpoint spends them
                await self._save(progress, tasks)
            if stats.reserved == 0:  # a version that was not offered yet, or the pace, may hold the slots
                await self._offer(progress)
                if stats.slots_used >= stats.slots:
                    await self._make_room()
        requested.cancel()
        return stopping.done() or not self._publisher.has_request.is_set()

    async def _prefetch_again(
        self, prefetch: asyncio.Task[StepBatch], progress: Progress, tasks: asyncio.TaskGroup
    ) -> asyncio.Task[StepBatch]:
        """Cancel the prefetch and start it again for the current version, which is not the one it was asked for."""
        prefetch.cancel()
        await asyncio.wait([prefetch])
        return tasks.create_task(self._prefetcher.fetch(progress.step + 1, progress.version), name="prefetch")

    async def _train(self, progress: Progress, step_batch: StepBatch, idle_s: float) -> Progress:
        started = time.monotonic()
        with self._clock.during("training"):
            result = await self._ranks.step(step_batch.packed)
        failpoint("learner.trained")
        if result.skipped:
            progress = await self._skip(progress, step_batch)
        else:
            self._bad_steps = 0
            version = await self._buffer.issue(self._fence, after=progress.version)
            failpoint("learner.issued")
            self._publisher.progress = progress = replace(progress, step=step_batch.step, version=version)
            # before the version can be seen, so that no version is used twice, whatever Redis loses
            await self._record(progress, step_batch)
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
            idle=self._clock.row(),
            checkpoint=self._checkpoints.row(),
        )
        await self._report(finished)
        return progress

    async def _skip(self, progress: Progress, step_batch: StepBatch) -> Progress:
        """Count a step whose loss or gradient was not finite: no new version, and the slots of its groups are released.

        Raises Diverged after `max_bad_steps` in a row.
        """
        self._bad_steps += 1
        if self._bad_steps >= self._config.max_bad_steps:
            raise Diverged(
                f"{self._bad_steps} steps in a row had a loss or gradient that is not finite, the last one step "
                f"{step_batch.step}; lower learner.optimizer.learning_rate, or resume from an older checkpoint"
            )
        log.warning(f"step {step_batch.step} skipped: its loss or gradient is not finite")
        await self._offer(progress)  # the skipped step's slots are released once these weights are live
        with self._clock.during("pushing"):
            if await self._publisher.until_live(progress.version):
                await self._buffer.release(self._fence, step_batch.step)
        self._publisher.progress = progress = replace(progress, step=step_batch.step)
        await self._record(progress, step_batch)
        return progress

    async def _save(self, progress: Progress, tasks: asyncio.TaskGroup) -> None:
        await self._offer(progress)  # the groups of a checkpoint are spent once its weights are live
        with self._clock.during("checkpoint"):
            await self._checkpoints.begin(progress, tasks)

    async def _offer(self, progress: Progress) -> None:
        """Pack and offer the current weights, unless they were offered already or versions are pinned."""
        if self._publisher.may_offer:
            with self._clock.during("pushing"):
                digest = await self._ranks.pack_version(progress.version, self._publisher.make_room())
            packed = PackedVersion(version=progress.version, timeline=progress.timeline, step=progress.step, digest=digest)
            self._publisher.offer(packed, releases=progress.step)

    async def _handle_request(self, progress: Progress) -> Progress:
        """Handle a pending operator request: push now, pin or roll back."""
        if (wanted := self._publisher.take_rollback()) is not None:
            self._publisher.progress = progress = await self._roll_back(progress, wanted)
        if self._publisher.is_due:
            await self._offer(progress)
        return progress

    async def _roll_back(self, progress: Progress, wanted: Rollback) -> Progress:
        """Serve a checkpoint's weights under a new version, and give the weights being trained a version above that one.

        Versions only grow, and the order of the two keeps every group at an age of at least 0. If the checkpoint cannot be
        read, an error is logged and the weights stay pinned.
        """
        version = await self._buffer.issue(self._fence, after=progress.version)
        digest = await self._ranks.pack_checkpoint(version, self._publisher.versions_in_use, wanted.checkpoint)
        if digest is None:
            log.error(f"{wanted.checkpoint} cannot be read, so there is no rollback to it; the weights stay pinned")
            return progress
        renumbered = replace(progress, version=await self._buffer.issue(self._fence, after=version))
        packed = PackedVersion(version=version, timeline=progress.timeline, step=wanted.step, digest=digest)
        await self._record_rollback(packed, renumbered.version)  # before the version can be seen, as for every version
        # The weights trained from here on are one version newer, so the slots of all but the last step are released.
        self._publisher.offer(packed, releases=progress.step - 1)
        return renumbered


IDLE_S = 5.0
"""Seconds between two log lines and idle orders while the loop waits."""
