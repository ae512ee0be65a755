"""Which groups are taken where several rules apply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_rl.errors import ServerRewound
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import RolloutGroup, Ticket
from tests.support.groups import group
from tests.support.runs import Run, publish


def of_environment(ticket: Ticket, name: str) -> RolloutGroup:
    rolled = group(ticket)
    return replace(rolled, task=replace(rolled.task, environment=name))


async def ready(buffer: ReplayBuffer, count: int, version: int = 0, environment: str = "e") -> list[str]:
    tickets = await buffer.reserve("w", version=version, count=count, wait_s=0)
    assert len(tickets) == count
    for ticket in tickets:
        assert await buffer.commit("w", of_environment(ticket, environment)) == "stored"
    return [ticket.id for ticket in tickets]


async def take(buffer: ReplayBuffer, fence: int, step: int, num_groups: int = 2, version: int = 0, **more) -> list[str]:
    batch = await buffer.take(fence, step=step, version=version, num_groups=num_groups, wait_s=0, **more)
    return [entry.group.id for entry in batch]


async def two_generations(run: Run, selector: str) -> tuple[ReplayBuffer, int, list[str], list[str]]:
    buffer, fence = await run.start(selector=selector)
    old = await ready(buffer, 2)
    await publish(buffer, fence)
    return buffer, fence, old, await ready(buffer, 2, version=1)


@pytest.mark.parametrize("selector", ["fifo", "windowed_fifo"])
async def test_fifo_takes_the_oldest(run: Run, selector: str):
    buffer, fence, old, young = await two_generations(run, selector)
    assert await take(buffer, fence, 1, version=1) == old
    assert await take(buffer, fence, 2, version=1) == young


async def test_freshest_takes_the_youngest(run: Run):
    buffer, fence, old, young = await two_generations(run, "freshest")
    assert set(await take(buffer, fence, 1, version=1)) == set(young)
    assert set(await take(buffer, fence, 2, version=1)) == set(old)


async def test_only_windowed_fifo_waits_for_stragglers(run: Run):
    for selector, expected in (("windowed_fifo", 0), ("fifo", 1), ("freshest", 1), ("uniform", 1), ("prioritized", 1)):
        buffer, fence = await run.start(f"-{selector}", selector=selector, max_age=1, groups_per_step=1)
        await buffer.reserve("slow", version=0, count=1, wait_s=0)
        await publish(buffer, fence)
        await ready(buffer, 1, version=1)
        assert len(await take(buffer, fence, 1, num_groups=1, version=1)) == expected, selector


async def test_uniform_takes_every_group_and_has_no_favourites(run: Run):
    buffer, fence = await run.start(selector="uniform", max_age=100, groups_per_step=1)
    places: dict[str, int] = {}
    await ready(buffer, 8)
    for step in range(1, 201):
        [first] = await take(buffer, fence, step, num_groups=1)
        places[first] = step
        await buffer.release(fence, step)
        await buffer.checkpoint(fence, step)
        await ready(buffer, 1)
    waited = [step - max(0, int(ticket[1:]) - 7) for ticket, step in places.items()]
    assert max(waited) > 8, "in a queue no group would wait longer than its length"
    assert sum(waited) / len(waited) == pytest.approx(8, rel=0.3)


async def test_priorities_decide_who_trains_again(run: Run):
    buffer, fence = await run.start(selector="prioritized", max_uses=200, max_age=1000, groups_per_step=2)
    heavy, light = await ready(buffer, 2)
    assert set(await take(buffer, fence, 1)) == {heavy, light}
    await buffer.prioritize(fence, {heavy: 9.0, light: 1.0, "t000000077": 5.0})
    await buffer.release(fence, 1)
    chosen = []
    for step in range(2, 152):
        chosen += await take(buffer, fence, step, num_groups=1)
        await buffer.release(fence, step)
    assert chosen.count(heavy) / len(chosen) == pytest.approx(0.9, abs=0.08)
    assert (await buffer.audit()).is_clean


async def test_a_step_holds_no_more_tokens_than_its_budget(run: Run):
    buffer, fence = await run.start(max_age=4)
    a, b, c, d = await ready(buffer, 4)  # of 8 tokens each
    assert await take(buffer, fence, 1, num_groups=4, max_tokens=20) == [a, b]
    assert await take(buffer, fence, 1, num_groups=4, max_tokens=20) == [a, b], "the same step, the same groups"
    assert await take(buffer, fence, 2, num_groups=4, max_tokens=3) == [c], "one that is larger than the budget goes alone"
    assert await take(buffer, fence, 3, num_groups=4, max_tokens=20) == [], "more might fit"
    [e] = await ready(buffer, 1)
    assert await take(buffer, fence, 3, num_groups=2, max_tokens=20) == [d, e]


async def test_an_environment_takes_no_more_than_its_quota(run: Run):
    buffer, fence = await run.start(quotas={"quick": 1}, groups_per_step=3)
    quick = await ready(buffer, 3, environment="quick")
    slow = await ready(buffer, 2, environment="slow")
    assert await take(buffer, fence, 1, num_groups=3) == [quick[0], *slow]
    assert await take(buffer, fence, 2, num_groups=2) == []
    slow = await ready(buffer, 1, environment="slow")
    assert await take(buffer, fence, 2, num_groups=2) == [quick[1], *slow]


async def test_a_quota_yields_to_age_and_never_stops_a_run(run: Run):
    buffer, fence = await run.start(quotas={"quick": 0}, max_age=1, groups_per_step=2)
    first = await ready(buffer, 2, environment="quick")
    assert await take(buffer, fence, 1, version=0) == []
    assert await take(buffer, fence, 1, version=1) == first, "in their last version"
    await buffer.release(fence, 1)
    second = await ready(buffer, 4, environment="quick")
    assert await take(buffer, fence, 2, version=0) == second[:2], "all slots are full and no other group can come"


async def test_steps_follow_each_other(run: Run):
    """A gap means that the server has lost a step: see test_servers_*.py for how that happens."""
    buffer, fence = await run.start()
    await ready(buffer, 4)
    await take(buffer, fence, 1)
    with pytest.raises(ServerRewound, match="checkpoint"):
        await take(buffer, fence, 3)
    assert len(await take(buffer, fence, 2)) == 2
