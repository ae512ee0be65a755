"""What a learner may rely on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import TypeAdapter

from async_rl.errors import FenceLost, LearnerAlreadyRunning
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition, TakenGroup, Ticket, UndoneGroup, VersionRecord
from tests.support.groups import group
from tests.support.runs import Run, limits, publish


async def ready(buffer: ReplayBuffer, count: int, version: int = 0) -> list[Ticket]:
    tickets = await buffer.reserve("w", version=version, count=count, wait_s=0)
    assert len(tickets) == count
    for ticket in tickets:
        assert await buffer.commit("w", group(ticket)) == "stored"
    return tickets


async def taken(buffer: ReplayBuffer, fence: int, step: int, version: int = 0, num_groups: int = 2, **more) -> list[str]:
    batch = await buffer.take(fence, step=step, version=version, num_groups=num_groups, wait_s=0, **more)
    return [entry.group.id for entry in batch]


# -- the fence ----------------------------------------------------------------------------------------------------------
async def test_a_lease_left_behind_is_waited_out(run: Run):
    dead, first = await run.start()
    second = await (await run.open()).acquire("successor", limits())
    assert second > first
    with pytest.raises(FenceLost):
        await dead.hold(first)


async def test_a_learner_that_is_alive_keeps_others_out(run: Run):
    buffer, fence = await run.start(learner_lease_s=60)  # also one that stands still for a moment
    rival = await run.open()
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(_hold(buffer, fence))
        with pytest.raises(LearnerAlreadyRunning, match="learner"):
            await rival.acquire("rival", limits())
        beating.cancel()
    await buffer.hold(fence)


async def _hold(buffer: ReplayBuffer, fence: int) -> None:
    while True:
        await buffer.hold(fence)
        await asyncio.sleep(0.05)


async def test_a_resigned_lease_is_free_at_once(run: Run):
    buffer, fence = await run.start()
    async with asyncio.TaskGroup() as tasks:
        successor = tasks.create_task((await run.open()).acquire("successor", limits()))
        await buffer.resign(fence)
    assert successor.result() > fence


async def test_the_lease_of_an_owner_known_to_be_dead_is_free_at_once(run: Run):
    buffer, fence = await run.start(learner_lease_s=60)
    holding = asyncio.create_task(_hold(buffer, fence))
    successor = await run.open()
    with pytest.raises(LearnerAlreadyRunning):
        await successor.acquire("successor", limits(), succeeds="another")
    assert await successor.acquire("successor", limits(), succeeds="learner") > fence
    with pytest.raises(FenceLost):
        await holding


async def test_a_fence_is_above_all_that_the_caller_and_the_server_know(run: Run):
    buffer, first = await run.start()
    await buffer.resign(first)
    second = await buffer.acquire("knows of an earlier server", limits(), after=41)
    await buffer.resign(second)
    third = await buffer.acquire("knows less than the server", limits(), after=7)
    assert (first, second, third) == (1, 42, 43), "fences count learners, whatever the clock says"
    with pytest.raises(FenceLost):
        await buffer.hold(first)


RECORD = VersionRecord(version=5, timeline="t", step=5, digest="d")
LEARNER_CALLS = {
    "discard": lambda buffer, fence: buffer.discard(fence, ["t000000000"]),
    "prioritize": lambda buffer, fence: buffer.prioritize(fence, {"t000000000": 2.0}),
    "hold": lambda buffer, fence: buffer.hold(fence),
    "recover": lambda buffer, fence: buffer.recover(fence, None),
    "take": lambda buffer, fence: buffer.take(fence, step=9, version=0, num_groups=1, wait_s=0),
    "issue": lambda buffer, fence: buffer.issue(fence, after=0),
    "publish": lambda buffer, fence: buffer.publish(fence, RECORD),
    "release": lambda buffer, fence: buffer.release(fence, 9),
    "position": lambda buffer, fence: buffer.position(fence, 9),
    "checkpoint": lambda buffer, fence: buffer.checkpoint(fence, 9),
    "resign": lambda buffer, fence: buffer.resign(fence),
}


@pytest.mark.parametrize("call", LEARNER_CALLS.values(), ids=LEARNER_CALLS.keys())
async def test_a_learner_that_was_replaced_changes_nothing(run: Run, call):
    buffer, old = await run.start()
    await ready(buffer, 2)
    await buffer.resign(old)
    await buffer.acquire("successor", limits())
    before = await buffer.stats()
    with pytest.raises(FenceLost, match="replaced"):
        await call(buffer, old)
    assert await buffer.stats() == before


# -- taking -------------------------------------------------------------------------------------------------------------
async def test_a_batch_is_whole_or_nothing_and_a_commit_wakes_the_learner(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 1)
    assert await taken(buffer, fence, step=1) == []
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task((await run.open()).take(fence, step=1, version=0, num_groups=2, wait_s=60))
        await ready(buffer, 1)
    assert [entry.group.id for entry in waiting.result()] == ["t000000000", "t000000001"]


async def test_a_group_comes_out_as_it_went_in(run: Run):
    buffer, fence = await run.start()
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    await publish(buffer, fence)
    sent = group(ticket, versions=(0, 0, 1))
    await buffer.commit("w", sent)
    [got] = await buffer.take(fence, step=1, version=2, num_groups=1, wait_s=0)
    assert (got.age, got.age_in_flight, got.age_in_queue) == (2, 1, 1)
    assert (got.group.id, got.group.task, got.group.worker) == (sent.id, sent.task, sent.worker)
    for there, here in zip(got.group.rollouts, sent.rollouts, strict=True):
        assert (there.reward, there.status) == (here.reward, here.status)
        assert there.samples[0].versions == here.samples[0].versions
        np.testing.assert_array_equal(there.samples[0].token_ids, here.samples[0].token_ids)
        np.testing.assert_array_equal(there.samples[0].loss_mask, here.samples[0].loss_mask)
        np.testing.assert_array_equal(there.samples[0].logprobs, here.samples[0].logprobs)


async def test_the_same_step_takes_the_same_groups_again(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 4)
    first = await taken(buffer, fence, step=1)
    assert await taken(buffer, fence, step=1) == first
    assert set(await taken(buffer, fence, step=2)).isdisjoint(first)


async def test_no_group_beyond_max_age_is_ever_returned(run: Run):
    buffer, fence = await run.start(max_age=1)
    await ready(buffer, 2)
    await publish(buffer, fence)
    await ready(buffer, 2, version=1)
    batch = await buffer.take(fence, step=1, version=2, num_groups=2, wait_s=0, patient=False)
    assert [(entry.group.id, entry.age) for entry in batch] == [("t000000002", 1), ("t000000003", 1)]
    stats = await buffer.stats()
    assert stats.dropped == {"stale": 2}
    assert stats.slots_used == 2
    [again, _] = await buffer.reserve("w", version=1, count=2, wait_s=0)
    assert (again.task_index, again.attempt) == (0, 2)


async def test_the_oldest_groups_leave_first(run: Run):
    buffer, fence = await run.start()
    early, late = await buffer.reserve("w", version=0, count=2, wait_s=0)
    await publish(buffer, fence)
    await ready(buffer, 2, version=1)
    await buffer.commit("w", group(late))
    await buffer.commit("w", group(early))
    assert await taken(buffer, fence, step=1, version=1) == [early.id, late.id]


async def test_a_straggler_in_its_last_version_is_waited_for_or_let_go(run: Run):
    buffer, fence = await run.start(max_age=1, groups_per_step=1)
    [straggler] = await buffer.reserve("slow", version=0, count=1, wait_s=0)
    await ready(buffer, 1)
    assert len(await taken(buffer, fence, step=1, num_groups=1)) == 1
    await publish(buffer, fence)
    await buffer.release(fence, 1)
    [other] = await ready(buffer, 1, version=1)
    assert await taken(buffer, fence, step=2, version=1, num_groups=1) == []
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(buffer.take(fence, step=2, version=1, num_groups=1, wait_s=60))
        await (await run.open()).commit("slow", group(straggler))
    assert [entry.group.id for entry in waiting.result()] == [straggler.id]
    assert await taken(buffer, fence, step=3, version=2, num_groups=1) == [other.id]


async def test_an_impatient_take_does_not_wait(run: Run):
    buffer, fence = await run.start(max_age=0, groups_per_step=2)
    await buffer.reserve("slow", version=0, count=1, wait_s=0)
    await ready(buffer, 1)
    await publish(buffer, fence)
    assert await taken(buffer, fence, step=1, num_groups=1) == ["t000000001"]
    buffer, fence = await run.start("-second", max_age=1, groups_per_step=1)
    await buffer.reserve("slow", version=0, count=1, wait_s=0)
    await publish(buffer, fence)
    [group_of_1] = await ready(buffer, 1, version=1)
    assert await taken(buffer, fence, step=1, version=1, num_groups=1) == []
    assert await taken(buffer, fence, step=1, version=1, num_groups=1, patient=False) == [group_of_1.id]


async def test_a_straggler_that_is_given_up_no_longer_holds_the_learner(run: Run):
    buffer, fence = await run.start(max_age=1, groups_per_step=1)
    [straggler] = await buffer.reserve("slow", version=0, count=1, wait_s=0)
    await publish(buffer, fence)
    await ready(buffer, 1, version=1)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(buffer.take(fence, step=1, version=1, num_groups=1, wait_s=60))
        await (await run.open()).abandon("slow", straggler.id, "abandoned")
    assert len(waiting.result()) == 1


# -- versions -----------------------------------------------------------------------------------------------------------
async def test_versions_are_never_used_twice_and_only_grow(run: Run):
    buffer, fence = await run.start()
    assert [await buffer.issue(fence, after=version) for version in (0, 0, 1, 2)] == [1, 1, 2, 3]
    await buffer.publish(fence, VersionRecord(version=3, timeline="t", step=1, digest="d"))
    await buffer.publish(fence, VersionRecord(version=2, timeline="t", step=0, digest="d"))
    assert (await buffer.stats()).version == 3
    await buffer.resign(fence)
    fence = await buffer.acquire("next", limits())
    position = BufferPosition(step=0, version=9, next_ticket=0, next_task=0)
    assert (await buffer.recover(fence, position)).version == 9
    assert await buffer.issue(fence, after=9) == 10


# -- crashes ------------------------------------------------------------------------------------------------------------
async def test_without_a_checkpoint_everything_taken_comes_back(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 4)
    first = await taken(buffer, fence, step=1)
    await buffer.release(fence, 1)
    assert (await buffer.stats()).slots_used == 2
    await buffer.resign(fence)
    fence = await buffer.acquire("next", limits())
    recovery = await buffer.recover(fence, None)
    assert (recovery.returned, recovery.spent) == (2, 0)
    assert (await buffer.stats()).slots_used == 4
    assert await taken(buffer, fence, step=1) == first


async def test_what_a_checkpoint_contained_that_is_gone_is_rolled_again(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 6)
    positions, trained = [], list[list[TakenGroup]]()
    for step in (1, 2, 3):
        trained.append(await buffer.take(fence, step=step, version=0, num_groups=2, wait_s=0))
        await buffer.release(fence, step)
        if step < 3:  # step 3 was trained, but its learner died before the checkpoint
            positions.append(await buffer.position(fence, step))
            await buffer.checkpoint(fence, step)
    undone = [UndoneGroup(each.group.id, each.task_index, each.attempt) for each in (*trained[1], *trained[2])]
    losses = []
    for _ in range(2):  # twice, because the first successor died in between
        await buffer.resign(fence)
        fence = await buffer.acquire("next", limits())
        recovery = await buffer.recover(fence, positions[0], undone)  # that of step 2 is damaged
        losses.append(recovery.lost)
    assert losses == [2, 0], "of step 2; the groups of step 3 are still there, and nothing is rolled again twice"
    await publish(buffer, fence)
    stats = await buffer.stats()
    assert (stats.spent, stats.lost_to_rollback, stats.ready) == (2, 2, 2)
    again = await buffer.reserve("w", version=stats.version, count=3, wait_s=0)
    assert [(ticket.task_index, ticket.attempt) for ticket in again] == [(2, 2), (3, 2), (6, 1)]
    assert await buffer.commit("w", group(trained[1][0].group.id)) == "already"
    assert (await buffer.audit()).is_clean


async def test_a_checkpoint_divides_what_is_spent_from_what_comes_back(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 6)
    for step in (1, 2, 3):
        await taken(buffer, fence, step=step)
    position = await buffer.position(fence, 2)
    await buffer.resign(fence)  # killed between the checkpoint's rename and `checkpoint`
    fence = await buffer.acquire("next", limits())
    recovery = await buffer.recover(fence, position)
    assert (recovery.returned, recovery.spent) == (2, 4)
    assert await taken(buffer, fence, step=3) == ["t000000004", "t000000005"]
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    assert (audit.stats.spent, audit.stats.taken) == (4, 2)


async def test_the_step_alone_says_which_batches_a_checkpoint_contains(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 4)
    for step in (1, 2):
        await taken(buffer, fence, step=step)
    recovery = await buffer.recover(fence, BufferPosition(step=1, version=0, next_ticket=0, next_task=0))
    assert (recovery.returned, recovery.spent) == (2, 2)


async def test_what_was_spent_never_comes_back(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 2)
    await taken(buffer, fence, step=1)
    await buffer.checkpoint(fence, 1)
    await buffer.checkpoint(fence, 1)
    recovery = await buffer.recover(fence, None)
    assert recovery.returned == 0
    assert (await buffer.stats()).spent == 2


async def test_a_position_survives_json(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 2)
    [given_up] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    await buffer.abandon("w", given_up.id, "abandoned")
    position = await buffer.position(fence, 0)
    assert len(position.redo) == 1
    assert len(position.outstanding) == 2
    assert TypeAdapter(BufferPosition).validate_python(json.loads(json.dumps(asdict(position)))) == position


async def test_beside_an_empty_server_no_task_is_skipped_or_repeated(run: Run):
    buffer, fence = await run.start()
    await ready(buffer, 2)
    await taken(buffer, fence, step=1)
    finished, unfinished = await buffer.reserve("w", version=0, count=2, wait_s=0)
    await buffer.commit("w", group(finished))
    [given_up] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    await buffer.abandon("w", given_up.id, "abandoned")
    position = await buffer.position(fence, 1)

    empty, fence = await run.start("-empty")
    await empty.recover(fence, position)
    assert await empty.commit("w", group(unfinished)) == "lease_lost"
    tickets = await empty.reserve("w", version=9, count=4, wait_s=0)
    expected = [given_up.task_index, finished.task_index, unfinished.task_index, 5]
    assert [ticket.task_index for ticket in tickets] == expected
    assert tickets[0].id == "t000000005"
    assert (await empty.audit()).is_clean


async def test_beside_an_older_server_nothing_is_trained_twice(run: Run):
    """Two runs with the same start; one continues to a checkpoint, the other stands for the backup."""
    runs = [await run.start(suffix) for suffix in ("-older", "-newer")]
    for buffer, _ in runs:
        await ready(buffer, 4)
    newer, fence = runs[1]
    await taken(newer, fence, step=1)
    await newer.reserve("w", version=0, count=1, wait_s=0)
    position = await newer.position(fence, 1)

    older, fence = runs[0]
    recovery = await older.recover(fence, position)
    assert (recovery.spent, recovery.returned) == (2, 0)
    assert await taken(older, fence, step=2) == ["t000000002", "t000000003"]
    [lost] = await older.reserve("w", version=0, count=1, wait_s=0)
    assert (lost.task_index, lost.attempt, lost.id) == (4, 2, "t000000005")
    assert (await older.audit()).is_clean


# -- everything at once -------------------------------------------------------------------------------------------------
async def test_many_workers_and_a_learner_train_every_task_once_and_in_time(run: Run):
    buffer, fence = await run.start(max_age=2, groups_per_step=4)
    steps, done = 12, asyncio.Event()

    async def work(name: str) -> None:
        mine = await run.open()
        while not done.is_set():
            version = (await mine.stats()).version
            for ticket in await mine.reserve(name, version=version, count=2, wait_s=0.05):
                await asyncio.sleep(0.002 * (int(ticket.id[1:]) % 7))
                await mine.commit(name, group(ticket))

    trained: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(work(f"w{number}"))
        for step in range(1, steps + 1):
            batch = await buffer.take(fence, step=step, version=step - 1, num_groups=4, wait_s=60)
            trained += [int(entry.group.task.key[1:]) for entry in batch]
            assert all(entry.age <= 2 for entry in batch)
            await publish(buffer, fence)
            await buffer.release(fence, step)
        done.set()
    assert len(trained) == len(set(trained)) == 4 * steps
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    assert not audit.stats.dropped, "with `wait` nothing becomes stale"
