"""The log of changes of the mix of environments: what workers and learners may rely on."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition, MixChange, Ticket
from tests.support.runs import Run, limits, started


async def added(buffer: ReplayBuffer, change: str) -> MixChange:
    log = await buffer.mix()
    entry = await buffer.change_mix(log[-1].id if log else "", change)
    assert entry is not None
    return entry


async def drawn(buffer: ReplayBuffer, count: int) -> list[Ticket]:
    return await buffer.reserve("w", version=(await buffer.stats()).version, count=count, wait_s=0)


async def test_a_change_holds_from_the_first_task_that_is_not_issued(run: Run):
    buffer, _ = await run.start()
    early = await drawn(buffer, 2)
    change = await added(buffer, '{"weight": 1}')
    late = await drawn(buffer, 2)
    assert [ticket.mix for ticket in early] == ["", ""]
    assert change.at == 2 == late[0].task_index
    assert {ticket.mix for ticket in late} == {change.id}
    assert await buffer.mix() == (change,)


async def test_a_task_that_is_rolled_again_tells_of_the_changes_since(run: Run):
    buffer, _ = await run.start()
    [first] = await drawn(buffer, 1)
    change = await added(buffer, "{}")
    await buffer.abandon("w", first.id, "abandoned")
    [again] = await drawn(buffer, 1)
    assert (again.task_index, again.mix) == (first.task_index, change.id)


async def test_of_two_who_change_the_mix_at_once_one_begins_again(run: Run):
    buffer, _ = await run.start()
    one = await buffer.change_mix("", "one")
    assert one is not None
    assert await buffer.change_mix("", "two") is None
    assert await buffer.change_mix("", "one") == one, "its reply may have been lost on the way"
    assert [entry.change for entry in await buffer.mix()] == ["one"]
    two = await buffer.change_mix(one.id, "one")
    assert two is not None
    assert two.id != one.id


async def test_nothing_changes_while_a_learner_takes_over(run: Run):
    buffer, fence = await run.start()
    await buffer.resign(fence)
    fence = await buffer.acquire("next", limits())
    assert await buffer.change_mix("", "{}") is None
    await buffer.recover(fence, None)
    assert await buffer.change_mix("", "{}") is not None


async def test_a_position_carries_the_mix_to_an_empty_buffer(run: Run):
    buffer, fence = await run.start()
    await drawn(buffer, 3)
    saved_change = await added(buffer, '{"name": "ö"}')
    await drawn(buffer, 2)
    position = await buffer.position(fence, 0)
    written = TypeAdapter(BufferPosition).validate_python(json.loads(json.dumps(asdict(position))))
    assert written.mix == (saved_change,)
    await added(buffer, "after the checkpoint")

    emptied = await run.open("-emptied")
    await added(emptied, "a change before the recovery")
    await started(emptied, written)
    assert await emptied.mix() == (saved_change,)
    again = {ticket.task_index: ticket.mix for ticket in await drawn(emptied, 5)}
    assert set(again) == {0, 1, 2, 3, 4}
    assert set(again.values()) == {saved_change.id}


async def test_a_learner_that_comes_back_to_an_intact_buffer_keeps_what_was_changed_since(run: Run):
    buffer, fence = await run.start()
    position = await buffer.position(fence, 0)
    change = await added(buffer, "after the checkpoint")
    await buffer.resign(fence)
    await started(buffer, position)
    assert await buffer.mix() == (change,)


async def test_shares_of_a_batch_change_while_the_run_goes_on(run: Run):
    buffer, fence = await run.start(quotas={"quick": 1})
    await buffer.change_limits({"quotas": {"quick": 2, "games": 1}})
    await buffer.resign(fence)
    await started(buffer, await buffer.position(fence, 0))
    await buffer.change_limits({"quotas": {}})
    with pytest.raises(ValueError, match="groups_per_step"):
        await buffer.change_limits({"groups_per_step": 1})
