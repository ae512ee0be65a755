"""Groups that train several steps: never twice in one step, never more often than allowed, across crashes."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition
from tests.support.groups import group
from tests.support.runs import Run, limits, publish


async def ready(buffer: ReplayBuffer, count: int, version: int = 0) -> list[str]:
    tickets = await buffer.reserve("w", version=version, count=count, wait_s=0)
    assert len(tickets) == count
    for ticket in tickets:
        await buffer.commit("w", group(ticket))
    return [ticket.id for ticket in tickets]


async def take(buffer: ReplayBuffer, fence: int, step: int, num_groups: int = 2, version: int = 0, **more) -> list[str]:
    batch = await buffer.take(fence, step=step, version=version, num_groups=num_groups, wait_s=0, **more)
    return [entry.group.id for entry in batch]


async def resumed(buffer: ReplayBuffer, fence: int, position: BufferPosition | None, **changed: object) -> int:
    await buffer.resign(fence)
    fence = await buffer.acquire("next", limits(**changed))
    saved = (
        TypeAdapter(BufferPosition).validate_python(json.loads(json.dumps(asdict(position)))) if position is not None else None
    )
    await buffer.recover(fence, saved)
    return fence


async def test_a_group_is_used_as_often_as_allowed_and_not_before_its_weights_are_live(run: Run):
    buffer, fence = await run.start(max_uses=2)
    first = await ready(buffer, 2)
    assert await take(buffer, fence, 1) == first
    assert await take(buffer, fence, 2) == []
    await buffer.release(fence, 1)
    assert (await buffer.stats()).again == 2
    assert await take(buffer, fence, 2) == first
    await buffer.release(fence, 2)
    assert await take(buffer, fence, 3) == []
    await buffer.checkpoint(fence, 2)
    stats = await buffer.stats()
    assert (stats.spent, stats.taken, stats.again, stats.bytes) == (2, 0, 0, 0)


async def test_who_never_trained_goes_before_who_did(run: Run):
    buffer, fence = await run.start(max_uses=3)
    used = await ready(buffer, 2)
    await take(buffer, fence, 1)
    await buffer.release(fence, 1)
    fresh = await ready(buffer, 1)
    assert await take(buffer, fence, 2) == [fresh[0], used[0]]


async def test_groups_in_their_second_step_hold_slots_like_any_other(run: Run):
    buffer, fence = await run.start(max_uses=2)
    await ready(buffer, 2)
    await take(buffer, fence, 1)
    assert (await buffer.stats()).slots_used == 2
    await buffer.release(fence, 1)
    assert (await buffer.stats()).slots_used == 0
    await take(buffer, fence, 2)
    assert (await buffer.stats()).slots_used == 2


async def test_a_crash_undoes_exactly_the_uses_that_were_lost(run: Run):
    more = {"max_uses": 2, "max_age": 4}
    buffer, fence = await run.start(**more)
    first = await ready(buffer, 2)
    await take(buffer, fence, 1)
    await buffer.release(fence, 1)
    position = await buffer.position(fence, 1)
    assert [ticket.steps for ticket in position.outstanding] == [(1,), (1,)]
    await take(buffer, fence, 2)
    await buffer.release(fence, 2)

    fence = await resumed(buffer, fence, position, **more)
    assert (await buffer.stats()).again == 2
    assert await take(buffer, fence, 2) == first, "step 2 is trained again, on the weights of step 1"
    await buffer.release(fence, 2)
    assert await take(buffer, fence, 3) == [], "both uses are gone"

    fence = await resumed(buffer, fence, None, **more)
    assert (await buffer.stats()).ready == 2, "without a checkpoint nothing was trained"
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems


async def test_an_older_server_learns_the_uses_from_the_checkpoint(run: Run):
    more = {"max_uses": 2}
    older, newer = await run.start("-older", **more), await run.start("-newer", **more)
    for buffer, fence in (older, newer):
        await ready(buffer, 2)
        await take(buffer, fence, 1)
        await buffer.release(fence, 1)
    buffer, fence = newer
    await take(buffer, fence, 2)
    await buffer.release(fence, 2)
    position = await buffer.position(fence, 2)

    buffer, fence = older
    fence = await resumed(buffer, fence, position, **more)
    assert await take(buffer, fence, 3) == []
    assert (await buffer.stats()).spent == 2


async def test_a_used_group_that_grew_too_old_is_spent_and_not_dropped(run: Run):
    buffer, fence = await run.start(max_uses=3, max_age=2)
    await ready(buffer, 2)
    await take(buffer, fence, 1)
    await buffer.release(fence, 1)
    assert await take(buffer, fence, 2, version=3) == []
    assert (await buffer.stats()).dropped == {}
    await buffer.checkpoint(fence, 1)
    stats = await buffer.stats()
    assert (stats.spent, stats.taken, stats.again) == (2, 0, 0)
    assert (await buffer.audit()).is_clean


async def test_samples_per_insert_holds_back_the_side_that_is_ahead(run: Run):
    """2 uses per group, error buffer 4: tickets are issued while at most 6 uses are owed, groups taken while at least -2."""
    buffer, fence = await run.start(max_uses=4, samples_per_insert=2.0, error_buffer=4.0, max_age=9)
    first = await ready(buffer, 3)
    assert (await buffer.stats()).owed == 6.0
    assert await buffer.reserve("w", version=0, count=1, wait_s=0) == [], "2 x (1 + 4 / 2) = 6 are owed already"
    for step in (1, 2, 3, 4):
        assert await take(buffer, fence, step), step
        await buffer.release(fence, step)
    assert (await buffer.stats()).owed == -2.0
    assert await take(buffer, fence, 5) == [], "it would be 4 below what was inserted, where 2 is the limit"
    await ready(buffer, 1)
    assert len(await take(buffer, fence, 5)) == 2
    assert first


async def test_a_group_that_ends_early_is_no_longer_owed(run: Run):
    buffer, fence = await run.start(max_uses=4, samples_per_insert=3.0, error_buffer=6.0, max_age=1)
    await ready(buffer, 2)
    await take(buffer, fence, 1)
    await buffer.release(fence, 1)
    await buffer.checkpoint(fence, 1)
    assert (await buffer.stats()).owed == 4.0
    assert await take(buffer, fence, 2, version=2) == []
    assert (await buffer.stats()).owed == 0.0
    fresh = await ready(buffer, 1)
    assert fresh
    await publish(buffer, fence)
    assert await take(buffer, fence, 2, version=9) == []
    assert (await buffer.stats()).owed == 0.0, "dropped before it was used"


async def test_no_step_before_min_size_groups(run: Run):
    buffer, fence = await run.start(max_uses=2, samples_per_insert=1.0, min_size=3, error_buffer=3.0)
    await ready(buffer, 2)
    assert await take(buffer, fence, 1) == []
    await ready(buffer, 1)
    assert len(await take(buffer, fence, 1)) == 2


@pytest.mark.parametrize("keep_steps", [0, 2])
async def test_spent_payloads_stay_as_long_as_they_are_kept(run: Run, keep_steps: int):
    buffer, fence = await run.start(keep_steps=keep_steps)
    spent: list[str] = []
    for step in (1, 2, 3):
        spent += await ready(buffer, 2)
        await take(buffer, fence, step)
        await buffer.checkpoint(fence, step)
    kept = await buffer.spent_groups(10)
    assert [(each.id, each.step) for each in kept] == [
        (ticket, 1 + place // 2) for place, ticket in enumerate(spent) if 1 + place // 2 > 3 - keep_steps
    ]
    stats = await buffer.stats()
    assert (stats.kept, stats.spent, stats.expired) == (2 * keep_steps, 6, 2 if keep_steps else 0)
    assert await buffer.commit("w", group(spent[-1])) == "already"
    await buffer.discard(fence, [each.id for each in kept[:1]] + ["t000000099"])
    assert [each.id for each in await buffer.spent_groups(10)] == [each.id for each in kept[1:]]
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    assert await resumed(buffer, fence, await buffer.position(fence, 3), keep_steps=keep_steps)
    assert (await buffer.stats()).kept == max(0, 2 * keep_steps - 1)
