"""Environments come and go while workers are at work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from async_rl.board.environment_mix import EnvironmentChange
from async_rl.config import BatchConfig
from async_rl.config.rollout import EnvironmentConfig, WorkerConfig
from async_rl.replay_protocol import Limits
from async_rl.supervision import run_with
from async_rl.telemetry import WORKER_METRICS
from async_rl.telemetry.table import find_metric
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import BufferPosition, VersionRecord
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.reporting.fleet_metrics import FleetMetrics
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.worker import Worker
from rollout_workers.worker_parts import WorkerParts
from tests.support.waiting import PATIENCE_S

HERE = __name__
BASE = [EnvironmentConfig(type="async_rl.testing:EchoAgent", name="base")]
LIMITS = Limits(max_age=0, groups_per_step=8, lease_s=600.0, max_attempts=2)


class Rare(EchoAgent):
    """Can be made by one worker only."""

    makers = 1

    def __init__(self, name: str, seed: int = 0) -> None:
        Rare.makers -= 1
        if Rare.makers < 0:
            raise ModuleNotFoundError("No module named 'rare'")
        super().__init__(name=name, seed=seed)


class WatchedBoard(MemoryBoard):
    """Tells when somebody begins to read."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        super().__init__(buffer)
        self.reads: asyncio.Queue[str] = asyncio.Queue()

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        self.reads.put_nowait(after)
        return await super().read(topic, after, wait_s)


async def recovered(buffer: MemoryBuffer, position: BufferPosition | None = None) -> int:
    fence = await buffer.acquire("learner", LIMITS)
    recovery = await buffer.recover(fence, position)
    version = await buffer.issue(fence, after=recovery.version)
    await buffer.publish(fence, VersionRecord(version=version, timeline="t", step=0, digest=""))
    return fence


async def change(buffer: MemoryBuffer, name: str, weight: float, type_name: str = "") -> int:
    log = await buffer.mix()
    environment = EnvironmentConfig(type=type_name, name=name) if type_name else None
    text = EnvironmentChange(name=name, weight=weight, environment=environment).model_dump_json(exclude_defaults=True)
    entry = await buffer.change_mix(log[-1].id if log else "", text)
    assert entry is not None
    return entry.at


@asynccontextmanager
async def workers(buffer: MemoryBuffer, count: int, version: int = 0) -> AsyncIterator[list[Worker]]:
    made = [
        Worker(
            WorkerParts(
                name=f"w{number}",
                buffer=buffer,
                inference=ScriptedInference(lambda text: text, version=version),
                tasks=TaskMix.from_config(BASE, seed=0, environments_from=[HERE]),
                batch=BatchConfig(groups_per_step=8, group_size=2, drop_no_signal=False),
                settings=WorkerConfig(groups_in_flight=4),
                seed=0,
                heartbeat_s=0.01,
            )
        )
        for number in range(count)
    ]
    stop = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        for worker in made:
            tasks.create_task(worker.run(stop))
        yield made
        stop.set()


async def batch(buffer: MemoryBuffer, fence: int, step: int) -> list[str]:
    """The environments of the next 8 groups; their slots return."""
    taken = await buffer.take(fence, step=step, version=0, num_groups=8, wait_s=PATIENCE_S)
    await buffer.release(fence, step)
    return [one.group.task.environment for one in taken]


async def test_the_mix_changes_under_a_worker_at_work():
    buffer = MemoryBuffer()
    fence = await recovered(buffer)
    async with workers(buffer, 1):
        assert await batch(buffer, fence, 1) == ["base"] * 8
        at = await change(buffer, "games", 1, "async_rl.testing:EchoAgent")
        seen = Counter[str]()
        for step in range(2, 8):
            seen.update(await batch(buffer, fence, step))
        old = at - 8  # drawn before the change
        assert seen["games"] in ((48 - old) // 2, (48 - old + 1) // 2)
        await change(buffer, "base", 0)
        for step in range(8, 11):
            last = await batch(buffer, fence, step)
        assert last == ["games"] * 8
    assert (await buffer.audit()).is_clean


async def test_a_worker_that_cannot_make_it_leaves_it_to_another():
    Rare.makers = 1
    buffer = MemoryBuffer()
    fence = await recovered(buffer)
    await change(buffer, "rare", 1, f"{HERE}:Rare")
    async with workers(buffer, 2) as fleet:
        landed = Counter[str]()
        for step in range(1, 5):
            landed.update(await batch(buffer, fence, step))
        assert landed["rare"] >= 8
        assert sum(worker.counters.groups["abandoned"] for worker in fleet) > 0
        assert [worker.counters.groups["failed"] for worker in fleet] == [0, 0]


async def test_metrics_tell_the_environments_apart():
    buffer = MemoryBuffer()
    fence = await recovered(buffer)
    await change(buffer, "games", 3, "async_rl.testing:EchoAgent")
    async with workers(buffer, 1) as [worker]:
        landed = Counter(await batch(buffer, fence, 1))
        board = WatchedBoard(buffer)
        fleet = FleetMetrics(board)

        async def tell() -> None:
            await board.reads.get()
            await board.post(WORKER_METRICS, {"worker": "w", "counters": dict(worker.counters.snapshot())})
            await board.reads.get()  # it was heard

        await run_with(tell, fleet=fleet.run)
        row = fleet.row()
    assert row["environment/games/groups"] >= landed["games"] >= 5
    assert row["environment/games/reward"] == row["environment/base/reward"] == 1
    assert all(find_metric(name) for name in row)


async def test_what_nobody_can_play_comes_to_an_end():
    buffer = MemoryBuffer()
    fence = await recovered(buffer)
    await change(buffer, "lost", 1, "no.such.module:Class")
    async with workers(buffer, 1) as [worker]:
        for step in range(1, 5):
            assert set(await batch(buffer, fence, step)) == {"base"}
        assert worker.counters.groups["failed"] > 0


async def test_after_a_crash_with_an_emptied_buffer_the_same_tasks_come_again():
    buffer = MemoryBuffer()
    fence = await recovered(buffer)
    await change(buffer, "games", 3, "async_rl.testing:EchoAgent")
    async with workers(buffer, 1):
        await batch(buffer, fence, 1)
        position = await buffer.position(fence, 1)
        taken = await buffer.take(fence, step=2, version=0, num_groups=8, wait_s=PATIENCE_S)
    before = {one.group.task.key for one in taken}

    emptied = MemoryBuffer()
    fence = await recovered(emptied, position)
    async with workers(emptied, 1, version=position.version + 1):
        taken = await emptied.take(fence, step=2, version=position.version + 1, num_groups=8, wait_s=PATIENCE_S)
    assert {one.group.task.key for one in taken} == before
