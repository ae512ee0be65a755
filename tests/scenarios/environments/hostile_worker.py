"""A worker in a process of its own, among hostile environments: `hostile_worker ENGINE TASKS EPISODES DEADLINE_S`.

Its last line of output says, as JSON, what landed, how fast, and what was left behind; the lines before are its log.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from async_rl.config import BatchConfig
from async_rl.config.rollout import EnvironmentConfig, WorkerConfig
from async_rl.replay_protocol import CommitResult, Limits
from async_rl.supervision import children_of
from async_rl.telemetry import configure_logs
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import RolloutGroup, Status, VersionRecord
from buffer.reference.memory_buffer import MemoryBuffer
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.worker import Worker
from rollout_workers.worker_parts import VersionedInference, WorkerParts
from tests.scenarios.environments.hostile import Hostile, Slow

GROUP_SIZE = 8
GENERATION_S = 0.05


class Landing(MemoryBuffer):
    """Says when the good groups of the first tasks are there."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.awaited = {index for index in range(tasks) if index % 2 == 0}
        self.complete = True
        self.all_landed = asyncio.Event()

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        index = int(group.task.answer)
        if index in self.awaited:
            self.awaited.remove(index)
            self.complete &= all(rollout.status is Status.OK for rollout in group.rollouts)
            if not self.awaited:
                self.all_landed.set()
        return await super().commit(worker, group, keep=keep)


async def main(engine: str, tasks: int, episodes: int, deadline_s: float) -> None:
    async with _open(engine) as inference:
        await _work(EchoAgent(), inference, 4, episodes, deadline_s)  # what is made only once is made
        before = _possessions()
        clean = await _work(Slow(deadline_s=deadline_s), inference, tasks, episodes, deadline_s)
        hostile = await _work(Hostile(), inference, tasks, episodes, deadline_s)
        after = _possessions()
    print(json.dumps({"before": before, "after": after, "clean": clean, "hostile": hostile}))


async def _work(
    agent: EchoAgent, inference: VersionedInference, tasks: int, episodes: int, deadline_s: float
) -> dict[str, Any]:
    buffer, stop = Landing(tasks), asyncio.Event()
    fence = await buffer.acquire("learner", Limits(max_age=99, groups_per_step=100, lease_s=30, max_attempts=3))
    await buffer.recover(fence, None)
    await buffer.publish(fence, VersionRecord(version=0, timeline="t", step=0, digest=""))
    worker = Worker(
        WorkerParts(
            name="w0",
            buffer=buffer,
            inference=inference,
            tasks=TaskMix([(EnvironmentConfig(type="0"), agent)]),
            batch=BatchConfig(groups_per_step=100, group_size=GROUP_SIZE, drop_no_signal=False),
            settings=WorkerConfig(groups_in_flight=episodes // GROUP_SIZE, episode_timeout_s=deadline_s, failure_budget=10**9),
            seed=0,
        )
    )
    started = time.monotonic()
    async with asyncio.TaskGroup() as running:
        running.create_task(worker.run(stop))
        await buffer.all_landed.wait()
        seconds = time.monotonic() - started
        stop.set()
    audit = await buffer.audit()
    return {
        "complete": buffer.complete,
        "groups_per_s": (tasks // 2) / seconds,
        "failures": worker.counters.failures,
        "left_behind": worker.counters.leaked.total(),
        "problems": audit.problems,
        "reserved": audit.stats.reserved,
    }


@asynccontextmanager
async def _open(engine: str) -> AsyncIterator[VersionedInference]:
    if engine == "scripted":

        async def answer(text: str) -> str:
            await asyncio.sleep(GENERATION_S)  # what a generation costs
            return text

        yield ScriptedInference(answer)
        return
    from tests.support import engine_stage

    async with engine_stage.engine() as running:
        await running.swap(0, engine_stage.weights(1))
        yield running


def _possessions() -> dict[str, int]:
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "processes": len(children_of(os.getpid())),
    }


if __name__ == "__main__":
    configure_logs("worker")
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
