"""A server that loses confirmed changes, and checkpoints taken while workers change the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.errors import FenceLost, ServerRewound
from buffer import keys
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from learner.checkpoints.fences import Fences
from tests.support.groups import group
from tests.support.runs import limits, publish
from tests.support.waiting import PATIENCE_S

Both = tuple[RedisBuffer, Server]
Act = Callable[[], Awaitable[None]]


class Moments:
    """A server that can be set back to an earlier state, as by a failover, a backup or a power cut."""

    def __init__(self, server: Server) -> None:
        self._redis = cast("Any", server.commands)

    async def keep(self) -> dict[bytes, bytes]:
        return {key: await self._redis.dump(key) for key in await self._redis.keys("*")}

    async def back_to(self, moment: dict[bytes, bytes]) -> None:
        await self._redis.flushall()
        for key, value in moment.items():
            await self._redis.restore(key, 0, value)


class Interrupted:
    """A connection that runs another client's action before or after the first scan."""

    def __init__(self, redis: Any, *, before_scan: Act | None = None, after_scan: Act | None = None) -> None:
        self._redis, self._before, self._after = redis, before_scan, after_scan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def hscan(self, *arguments: Any, **options: Any) -> Any:
        before, self._before = self._before, None
        if before is not None:
            await before()
        found = await self._redis.hscan(*arguments, **options)
        after, self._after = self._after, None
        if after is not None:
            await after()
        return found


async def begun(buffer: RedisBuffer, **changed: Any) -> int:
    fence = await buffer.acquire("learner", limits(**changed))
    await buffer.recover(fence, None)
    await publish(buffer, fence)
    return fence


async def again(buffer: RedisBuffer, fence: int, position: Any) -> int:
    await buffer.resign(fence)
    new = await buffer.acquire("successor", limits())
    await buffer.recover(new, position)
    await publish(buffer, new)
    return new


async def commit(buffer: RedisBuffer, count: int) -> list[Any]:
    tickets = await buffer.reserve("w", version=(await buffer.stats()).version, count=count, wait_s=0)
    for ticket in tickets:
        assert await buffer.commit("w", group(ticket)) == "stored"
    return tickets


async def test_a_lost_take_is_noticed_before_the_checkpoint(redis_buffer: Both):
    buffer, server = redis_buffer
    moments = Moments(server)
    fence = await begun(buffer)
    await commit(buffer, 2)
    before = await moments.keep()
    trained = {each.group.id for each in await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)}
    await moments.back_to(before)  # the last moments are lost; the learner trains on what it holds
    await publish(buffer, fence)
    await buffer.release(fence, 1)
    with pytest.raises(ServerRewound):
        await buffer.position(fence, 1)
    assert trained


async def test_a_server_set_back_into_a_recovery_does_not_starve_for_ever(redis_buffer: Both):
    buffer, server = redis_buffer
    moments = Moments(server)
    fence = await begun(buffer)
    await commit(buffer, 2)
    await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
    await buffer.resign(fence)
    new = await buffer.acquire("successor", limits())
    between = await moments.keep()
    await buffer.recover(new, None)
    await publish(buffer, new)
    await moments.back_to(between)
    with pytest.raises(ServerRewound):  # instead: step 1 of the old life, and no ticket is ever issued again
        await buffer.take(new, step=1, version=1, num_groups=2, wait_s=0)


async def test_the_redo_list_survives_a_server_set_back_by_less_than_a_ticket(redis_buffer: Both):
    buffer, server = redis_buffer
    moments = Moments(server)
    fence = await begun(buffer)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    before = await moments.keep()
    await buffer.abandon("w", ticket.id, "abandoned")  # task 0 waits to be rolled again
    position = await buffer.position(fence, 0)
    await moments.back_to(before)
    await again(buffer, fence, position)
    [rolled] = await buffer.reserve("w", version=1, count=1, wait_s=0)
    assert rolled.task_index == 0, "task 0 is skipped"


async def test_a_server_that_went_on_after_being_set_back_is_still_older(redis_buffer: Both):
    """Workers reserve before the learner starts: the restored server's numbers exceed the checkpoint's."""
    buffer, server = redis_buffer
    moments = Moments(server)
    fence = await begun(buffer, groups_per_step=4)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    before = await moments.keep()
    await buffer.commit("w", group(ticket))
    await commit(buffer, 3)
    trained = {each.group.task.key for each in await buffer.take(fence, step=1, version=0, num_groups=4, wait_s=0)}
    position = await buffer.position(fence, 1)
    await buffer.release(fence, 1)
    await buffer.checkpoint(fence, 1)
    await moments.back_to(before)
    await buffer.abandon("w", ticket.id, "abandoned")  # or its lease ends: task 0, trained by step 1, stands in redo
    await buffer.reserve("other", version=0, count=4, wait_s=0)  # next_ticket 5 > 4: "not older"
    new = await again(buffer, fence, position)
    for lost in ("t000000001", "t000000002", "t000000003", "t000000004"):
        await buffer.abandon("other", lost, "abandoned")
    rolled = await buffer.reserve("w", version=1, count=8, wait_s=0)
    assert not trained & {f"k{each.task_index}" for each in rolled}, "a task that was trained is rolled again"
    del new


async def test_a_task_reserved_while_the_position_is_read_is_not_skipped(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    fence = await begun(buffer)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    await buffer.abandon("w", ticket.id, "abandoned")
    worker = RedisBuffer(server, run_name)

    async def reserve() -> None:
        assert len(await worker.reserve("other", version=0, count=1, wait_s=0)) == 1

    server.commands = cast("Any", Interrupted(server.commands, before_scan=reserve))
    position = await buffer.position(fence, 0)
    tasks = {each.task_index for each in (*position.redo, *position.outstanding)} | set(range(position.next_task, 9))
    assert 0 in tasks, "an emptied server would never roll task 0"


async def test_a_task_stands_in_a_position_once(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    fence = await begun(buffer)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    worker = RedisBuffer(server, run_name)

    async def fail() -> None:
        await worker.abandon("w", ticket.id, "failed")

    server.commands = cast("Any", Interrupted(server.commands, after_scan=fail))
    position = await buffer.position(fence, 0)
    tasks = [each.task_index for each in (*position.redo, *position.outstanding)]
    assert tasks == [0], "an emptied server would roll task 0 twice"


# -- a clock that is set back: what was noted before lies an hour ahead -----------------------------------------------------
HOUR_MS = 3_600_000


async def test_a_successor_waits_for_a_lease_and_not_for_the_clock(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    fence = await begun(buffer)  # and dies
    await cast("Any", server.commands).hincrby(keys.key(run_name, "state"), "learner_expires", HOUR_MS)
    async with asyncio.timeout(PATIENCE_S):
        assert await buffer.acquire("successor", limits()) > fence


async def test_tickets_of_a_dead_worker_return_after_a_lease_and_not_after_the_clock(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    await begun(buffer, lease_s=1, max_age=0, groups_per_step=1)
    [ticket] = await buffer.reserve("dies", version=0, count=1, wait_s=0)
    await cast("Any", server.commands).zincrby(keys.key(run_name, "leases"), HOUR_MS, ticket.id)
    [again] = await buffer.reserve("lives", version=0, count=1, wait_s=30)
    assert (again.task_index, again.attempt) == (ticket.task_index, 2)


async def test_a_learner_that_slept_changes_nothing_on_a_server_that_was_emptied_meanwhile(redis_buffer: Both, tmp_path: Path):
    buffer, server = redis_buffer
    sleeper = await begun(buffer)
    Fences(tmp_path).claim(sleeper, "sleeper")
    await cast("Any", server.commands).flushall()
    successor = await buffer.acquire("successor", limits(), after=Fences(tmp_path).highest())
    Fences(tmp_path).claim(successor, "successor")
    with pytest.raises(FenceLost):
        await buffer.hold(sleeper)
    await buffer.hold(successor)
