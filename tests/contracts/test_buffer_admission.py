"""Which workers get tickets, and how limits change during a run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, cast

import pytest

from async_rl.errors import FenceLost
from async_rl.replay_protocol import ReplayBuffer
from buffer import keys
from buffer.redis_buffer import RedisBuffer
from buffer.reference.memory_buffer import MemoryBuffer
from buffer.reference.state_machine import SILENT_S
from buffer.server.client import Server
from tests.support.groups import group
from tests.support.runs import Run, limits, publish, started
from tests.support.waiting import eventually


async def reserved(buffer: ReplayBuffer, count: int, worker: str = "w", version: int = 0, wait_s: float = 0) -> list[str]:
    return [ticket.id for ticket in await buffer.reserve(worker, version=version, count=count, wait_s=wait_s)]


@pytest.mark.parametrize(("max_age", "slots", "bound"), [(0, 4, 0), (0.5, 6, 1), (1, 8, 1), (1.3, 9, 2)])
async def test_slots_may_be_a_fraction_and_ages_are_whole(run: Run, max_age: float, slots: int, bound: int):
    buffer, fence = await run.start(max_age=max_age, groups_per_step=4)
    tickets = await buffer.reserve("w", version=0, count=99, wait_s=0)
    assert len(tickets) == slots == (await buffer.stats()).slots
    for ticket in tickets:
        await buffer.commit("w", group(ticket))
    assert await buffer.take(fence, step=1, version=bound + 1, num_groups=1, wait_s=0) == []
    assert (await buffer.stats()).dropped == {"stale": slots}


async def test_no_worker_takes_more_than_a_share_while_others_wait(run: Run):
    buffer, _ = await run.start(max_age=0, groups_per_step=6)
    first = await reserved(buffer, 6, "greedy")
    got: Counter[str] = Counter()

    async def ask(worker: str) -> None:
        got[worker] = len(await reserved(await run.open(), 6, worker, wait_s=60))

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(ask(worker)) for worker in ("a", "b", "c")]
        await until_waiting(buffer, 3)
        for ticket in first:
            await buffer.abandon("greedy", ticket, "no_signal")
        await asyncio.wait(waiting)
    assert sum(got.values()) <= 6
    assert min(got.values()) >= 1, f"a worker got nothing: {got}"
    assert await buffer.stats()


async def until_waiting(buffer: ReplayBuffer, count: int) -> None:
    """Wait until so many workers are in the queue."""

    async def are_waiting() -> bool:
        if isinstance(buffer, MemoryBuffer):
            return len(buffer._machine._queue) >= count
        assert isinstance(buffer, RedisBuffer)
        return await buffer._run.run_command("zcard", buffer._run.key("waiting")) >= count

    await eventually(are_waiting, f"{count} workers are in the queue")


async def test_who_waits_longest_is_served_first(run: Run):
    buffer, _ = await run.start(max_age=0, groups_per_step=1)
    [held] = await reserved(buffer, 1, "holder")
    order: list[str] = []
    began = time.monotonic()

    async def ask(worker: str) -> None:
        mine = await run.open()
        [ticket] = await reserved(mine, 1, worker, wait_s=60)
        order.append(worker)
        await mine.abandon(worker, ticket, "no_signal")

    async with asyncio.TaskGroup() as tasks:
        for number, worker in enumerate(("a", "b", "c", "d"), start=1):
            tasks.create_task(ask(worker))
            await until_waiting(buffer, number)
        await buffer.abandon("holder", held, "no_signal")
    in_turn = order == ["a", "b", "c", "d"]
    assert in_turn or time.monotonic() - began > SILENT_S, "only who was silent for so long has lost its place"
    assert sorted(order) == ["a", "b", "c", "d"]


async def test_a_free_slot_wakes_the_worker_whose_turn_it_is_and_no_other(
    redis_buffer: tuple[RedisBuffer, Server], run_name: str
):
    """In a fleet of thousands most workers wait: each would ask for the same slot."""
    buffer, server = redis_buffer
    await started(buffer, max_age=0, groups_per_step=2)
    held = await reserved(buffer, 2, "holder")
    for worker in ("a", "b", "c", "d"):
        assert await reserved(buffer, 1, worker, wait_s=0.01) == []
    channel = keys.key(run_name, "on:slots")
    heard = cast("Any", server.waits).pubsub(ignore_subscribe_messages=True)
    await heard.psubscribe(f"{channel}:*", "end")
    for ticket in held:
        await buffer.abandon("holder", ticket, "no_signal")
    await server.commands.publish("end", "")
    woken = list[str]()
    async for message in heard.listen():
        if message["channel"] == b"end":
            break
        woken.append(message["channel"].decode().removeprefix(f"{channel}:"))
    await heard.aclose()
    assert woken == ["a", "a", "b"], "one slot is free, then two"


async def test_a_worker_that_vanishes_from_the_queue_does_not_block_others_for_long(run: Run):
    buffer, _ = await run.start(max_age=0, groups_per_step=1)
    [held] = await reserved(buffer, 1, "holder")
    assert await reserved(buffer, 1, "vanished", wait_s=0.01) == []
    await buffer.abandon("holder", held, "no_signal")
    assert len(await reserved(buffer, 1, "next", wait_s=30)) == 1


async def test_limits_change_while_the_run_goes_on_and_stay_changed(run: Run):
    buffer, fence = await run.start(max_age=0, groups_per_step=2)
    await reserved(buffer, 2)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reserved(await run.open(), 2, "other", wait_s=60))
        await until_waiting(buffer, 1)
        await buffer.change_limits({"max_age": 1, "selector": "fifo"})
    assert len(waiting.result()) == 2
    await buffer.resign(fence)
    await buffer.acquire("next", limits(max_age=0, groups_per_step=2))
    assert (await buffer.stats()).slots == 4


async def test_a_learner_sets_the_age_for_its_own_life_alone(run: Run):
    buffer, fence = await run.start(max_age=0, groups_per_step=2)
    await reserved(buffer, 2)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reserved(await run.open(), 2, "other", wait_s=60))
        await until_waiting(buffer, 1)
        await buffer.set_limit(fence, "max_age", 1)
    assert len(waiting.result()) == 2
    await buffer.resign(fence)
    await buffer.acquire("next", limits(max_age=0, groups_per_step=2))
    assert (await buffer.stats()).slots == 2
    with pytest.raises(FenceLost):
        await buffer.set_limit(fence, "max_age", 1)


async def test_the_learner_sets_the_pace_up_to_what_the_age_allows(run: Run):
    buffer, fence = await run.start(max_age=2, groups_per_step=2)
    await buffer.set_limit(fence, "pace", 1.5)
    assert len(await buffer.reserve("w", version=0, count=9, wait_s=0)) == 3
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reserved(await run.open(), 1, "other", wait_s=60))
        await until_waiting(buffer, 1)
        await buffer.set_limit(fence, "pace", 2.0)
    assert len(waiting.result()) == 1
    await buffer.set_limit(fence, "pace", 100.0)
    assert (await buffer.stats()).slots == 6
    await buffer.resign(fence)
    await buffer.acquire("next", limits(max_age=2, groups_per_step=2))
    assert (await buffer.stats()).slots == 6


async def test_a_pace_that_operators_set_stays(run: Run):
    buffer, fence = await run.start(max_age=3, groups_per_step=2)
    await buffer.change_limits({"pace": 2.5})
    await buffer.set_limit(fence, "pace", 1.0)
    assert (await buffer.stats()).slots == 5
    await buffer.change_limits({"pace": None})
    await buffer.set_limit(fence, "pace", 1.0)
    assert (await buffer.stats()).slots == 8
    await buffer.change_limits({"pace": "auto"})
    await buffer.set_limit(fence, "pace", 1.0)
    assert (await buffer.stats()).slots == 2


async def test_a_pace_counted_in_groups_gives_that_many_slots(run: Run):
    buffer, fence = await run.start(max_age=8, groups_per_step=10)
    for num_groups in range(10, 30):
        await buffer.set_limit(fence, "pace", num_groups / 10)
        assert (await buffer.stats()).slots == num_groups


async def test_fewer_slots_only_make_workers_wait(run: Run):
    buffer, fence = await run.start(max_age=1, groups_per_step=2)
    tickets = await buffer.reserve("w", version=0, count=4, wait_s=0)
    await buffer.change_limits({"max_age": 0})
    for ticket in tickets:
        assert await buffer.commit("w", group(ticket)) == "stored"
    assert await reserved(buffer, 1) == []
    assert len(await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)) == 2
    await publish(buffer, fence)
    await buffer.release(fence, 1)
    assert await buffer.take(fence, step=2, version=1, num_groups=2, wait_s=0) == []
    assert (await buffer.stats()).dropped == {"stale": 2}
    assert len(await reserved(buffer, 9, version=1)) == 2


async def test_nothing_else_can_be_changed(run: Run):
    buffer, _ = await run.start()
    with pytest.raises((ValueError, TypeError), match="groups"):
        await buffer.change_limits({"groups_of_step": 3})
    with pytest.raises(ValueError, match="during a run"):
        await buffer.change_limits({"groups_per_step": 3})
