"""A fleet without models: workers that commit, and a learner that always resumes from its checkpoint."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from async_rl.errors import FenceLost, ServerRewound
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition
from tests.support.groups import group
from tests.support.runs import limits, publish

GROUPS_PER_STEP = 2
CHECKPOINT_EVERY = 3
UP_TO_DATE = 10**9
"""A worker whose engine follows every publish at once."""


class Learner:
    """Trains nothing, but records what it would have trained in the timeline that survives its restarts."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self.trained: dict[int, list[str]] = {}
        self.saved: BufferPosition | None = None
        self.restarts = 0
        self.last = math.inf
        """The step to end with; set it while the learner runs."""
        self._progress = asyncio.Condition()

    async def train(self) -> None:
        """Run; whenever the lease or the server's data are lost, start again from the checkpoint."""
        while True:
            try:
                return await self._live()
            except (ServerRewound, FenceLost):
                self.restarts += 1

    async def _live(self) -> None:
        buffer = self._buffer
        fence = await buffer.acquire("learner", limits(groups_per_step=GROUPS_PER_STEP))
        recovery = await buffer.recover(fence, self.saved)
        first = self.saved.step + 1 if self.saved is not None else 1
        self.trained = {step: ids for step, ids in self.trained.items() if step < first}
        version = await publish(buffer, fence, after=recovery.version)
        step = first - 1
        while (step := step + 1) <= self.last:
            batch = []
            while not batch:
                batch = await buffer.take(fence, step=step, version=version, num_groups=GROUPS_PER_STEP, wait_s=1)
            self.trained[step] = [taken.group.id for taken in batch]
            version = await publish(buffer, fence, after=version)
            await buffer.release(fence, step)
            if step % CHECKPOINT_EVERY == 0:
                self.saved = await buffer.position(fence, step)
                await buffer.checkpoint(fence, step)
            async with self._progress:
                self._progress.notify_all()

    async def advances(self, steps: int) -> None:
        """Wait until this many more steps are trained."""
        goal = self.step + steps
        async with self._progress:
            await self._progress.wait_for(lambda: self.step >= goal)

    @property
    def step(self) -> int:
        return max(self.trained, default=0)

    def trained_twice(self) -> list[str]:
        uses = Counter(ticket for ids in self.trained.values() for ticket in ids)
        return [ticket for ticket, times in uses.items() if times > 1]


@asynccontextmanager
async def working(open_buffer: Callable[[], ReplayBuffer], workers: int = 2) -> AsyncIterator[set[str]]:
    """Run workers that commit all the time; yields the tickets of the groups they committed, with or without a reply."""
    handed_in: set[str] = set()

    async def work(name: str, buffer: ReplayBuffer) -> None:
        while True:
            for ticket in await buffer.reserve(name, version=UP_TO_DATE, count=2, wait_s=1):
                handed_in.add(ticket.id)
                await buffer.commit(name, group(ticket))

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(work(f"w{number}", open_buffer())) for number in range(workers)]
        yield handed_in
        for task in started:
            task.cancel()
