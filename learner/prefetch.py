"""Prefetch the next step batch: take groups from the buffer and pack them while the current step computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from async_rl.config import BatchConfig
from async_rl.config.buffer import StalenessConfig
from async_rl.replay_protocol import ReplayBuffer
from async_rl.supervision import working
from async_rl.types import TakenGroup
from learner.batches.batch import PackedBatch

PATIENCE_S = 5.0
"""Longest wait of one `take` in the buffer; between two of them the straggler deadline (`wait_deadline_s`) is checked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """Groups and packed batch of one optimizer step."""

    step: int
    groups: list[TakenGroup]
    packed: PackedBatch
    taken_at: float = 0.0
    """When the groups were taken, in seconds since 1970."""
    take_s: float = 0.0
    """How long that waited for them."""


class Prefetcher:
    """Takes and packs the groups of a step. The loop calls `fetch` for step n+1 while step n computes."""

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        fence: int,
        batch: BatchConfig,
        staleness: StalenessConfig,
        pack: Callable[[Sequence[TakenGroup]], PackedBatch],
        num_workers: Callable[[], int],
        blocked_workers: Callable[[], str] = lambda: "",
    ):
        self._buffer, self._fence = buffer, fence
        self._batch, self._staleness = batch, staleness
        self._pack, self._num_workers, self._blocked_workers = pack, num_workers, blocked_workers
        self.waits = False
        """Whether the next groups are asked for, and not there yet."""

    async def fetch(self, step: int, version: int) -> StepBatch:
        """Return the step batch that trains weights `version`. Waits without a limit until there are enough groups."""
        asked, self.waits = time.monotonic(), True
        groups = await self._take(step, version)
        self.waits = False
        taken_at, started = time.time(), time.monotonic()
        packed = await asyncio.to_thread(working("the packing of a batch")(self._pack), groups)
        pack_s = time.monotonic() - started
        packed = replace(packed, metrics={**packed.metrics, "time/pack": pack_s})
        return StepBatch(step=step, groups=groups, packed=packed, taken_at=taken_at, take_s=started - asked)

    async def _take(self, step: int, version: int) -> list[TakenGroup]:
        started = time.monotonic()
        while True:
            patient = time.monotonic() - started < self._staleness.wait_deadline_s
            groups = await self._buffer.take(
                self._fence,
                step=step,
                version=version,
                num_groups=self._batch.groups_per_step,
                wait_s=PATIENCE_S,
                max_tokens=self._batch.tokens_per_step,
                patient=patient,
            )
            if groups:
                return groups

    async def describe_wait(self) -> str:
        """Say in one sentence why the next batch is not ready yet."""
        stats, workers = await self._buffer.stats(), self._num_workers()
        if blocked := self._blocked_workers():
            return blocked
        if workers == 0:
            return "no worker is there yet; start one with `async-rl worker`"
        wanted, no_signal = self._batch.groups_per_step, stats.dropped.get("no_signal", 0)
        sentence = f"{stats.reserved} groups are being rolled out by {workers} workers"
        if stats.starving:
            sentence = (
                f"the Redis server is full, and commits wait for a checkpoint to free memory (redis.max_memory_mb); {sentence}"
            )
        elif stats.ready + stats.again < wanted:
            sentence = f"{stats.ready + stats.again} of {wanted} groups are ready, {sentence}"
        else:
            sentence = f"enough are ready, but {sentence} and would be too old later (staleness.selector: windowed_fifo)"
        if no_signal > stats.spent + stats.taken:
            sentence += f"; {no_signal} were dropped because all rewards in them were equal (batch.drop_no_signal)"
        return sentence
