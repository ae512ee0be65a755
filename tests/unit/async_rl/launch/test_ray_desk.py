"""Requests to a fleet on Ray: answered in any order, also when the one who asked is gone."""

from __future__ import annotations

import asyncio

from async_rl.launch.ray.desk import Desk, DrainOne, StopAll


async def test_a_request_is_answered_while_an_earlier_one_is_not() -> None:
    desk = Desk()
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(desk.ask(DrainOne(name="worker-0")))
        first, request = await desk.next_request()
        assert request == DrainOne(name="worker-0")
        stopping = tasks.create_task(desk.ask(StopAll()))
        second, request = await desk.next_request()
        assert request == StopAll()
        await desk.answer(second, "the fleet drains")
        assert await stopping == "the fleet drains"
        assert not draining.done()
        await desk.answer(first, "worker-0 has drained")
    assert draining.result() == "worker-0 has drained"


async def test_an_answer_that_is_no_longer_waited_for_is_dropped() -> None:
    desk = Desk()
    asking = asyncio.create_task(desk.ask(StopAll()))
    number, _ = await desk.next_request()
    asking.cancel()
    await asyncio.wait([asking])
    await desk.answer(number, "the fleet drains")
    asking = asyncio.create_task(desk.ask(StopAll()))
    number, _ = await desk.next_request()
    await desk.answer(number, "the fleet drains already")
    assert await asking == "the fleet drains already"
