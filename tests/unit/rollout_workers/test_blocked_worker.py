"""How long an environment is left alone that blocks its workers, and when it ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import pytest

from async_rl.board.worker_reports import BLOCKED, WorkerBlocked
from async_rl.config.rollout import BreakerConfig
from async_rl.errors import FailureBudgetSpent
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from rollout_workers.blocked_worker import TRIES, BlockingEnvironments
from rollout_workers.counters import Counters
from rollout_workers.limits.environment_limits import EnvironmentLimits


async def rests(times: Collection[float], played: Collection[str], *, is_replaced: bool = True) -> list[float]:
    """For how long `blocks` is left alone, by a worker that begins after it blocked others so many seconds ago."""
    board = MemoryBoard(MemoryBuffer())
    left: list[float] = []
    for age in times:
        report = WorkerBlocked(
            worker="w",
            environment="blocks",
            place="tasks.py:3 in reward",
            seconds=20,
            at=time.time() - age,
            is_replaced=is_replaced,
        )
        await board.post(BLOCKED, report.model_dump())
    await board.post(BLOCKED, {"not": "ours"})
    await board.post(BLOCKED, report_of_another(time.time()).model_dump())
    heard = asyncio.Event()

    class Limits(EnvironmentLimits):
        def block(self, environment: str, for_s: float) -> None:
            if environment == "another":
                heard.set()
            else:
                left.append(for_s)

    limits = Limits(BreakerConfig(pause_s=500), Counters(), may_wait=lambda: 1, played=lambda: played)
    blocking = BlockingEnvironments(board, limits)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(blocking.run())
        waiting = tasks.create_task(heard.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        waiting.cancel()
    return left


def report_of_another(at: float) -> WorkerBlocked:
    return WorkerBlocked(worker="w", environment="another", place="b.py:1 in f", seconds=20, at=at, is_replaced=True)


async def test_it_is_left_alone_twice_as_long_each_time():
    assert await rests([300, 200, 100], ["blocks", "good"]) == pytest.approx([200, 800, 1900], abs=60)


async def test_what_is_long_ago_or_went_on_by_itself_does_not_count():
    assert await rests([5000, 300], ["blocks", "good"]) == pytest.approx([200], abs=60)
    assert await rests([300, 200], ["blocks", "good"], is_replaced=False) == []


async def test_it_ends_its_workers_where_there_is_nothing_else_to_play():
    assert len(await rests([1] * (TRIES - 1), ["blocks"])) == TRIES - 1
    with pytest.raises(ExceptionGroup) as raised:
        await rests([1] * TRIES, ["blocks"])
    assert raised.group_contains(FailureBudgetSpent, match=r"'blocks' has blocked its workers 3 times.*tasks\.py:3 in reward")


async def test_a_run_that_is_started_again_is_not_ended_for_what_happened_before():
    assert len(await rests([70] * TRIES, ["blocks"])) == TRIES
