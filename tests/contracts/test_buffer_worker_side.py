"""What a worker may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest

from async_rl.types import RolloutGroup, Status, Ticket, VersionSpan
from tests.support.groups import group, sample
from tests.support.runs import Run, limits, publish
from tests.support.waiting import eventually


async def test_no_ticket_is_issued_before_a_learner_published_and_recovered(run: Run):
    buffer = await run.open()
    assert await buffer.reserve("w", version=0, count=1, wait_s=0) == []
    fence = await buffer.acquire("learner", limits())
    assert await publish(buffer, fence) == 0
    assert await buffer.reserve("w", version=0, count=1, wait_s=0) == []
    await buffer.recover(fence, None)
    assert await buffer.reserve("w", version=-1, count=1, wait_s=0) == []
    assert len(await buffer.reserve("w", version=0, count=1, wait_s=0)) == 1


async def test_a_waiting_worker_is_woken_by_a_publish(run: Run):
    buffer = await run.open()
    fence = await buffer.acquire("learner", limits())
    await buffer.recover(fence, None)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(buffer.reserve("w", version=0, count=1, wait_s=60))
        await publish(await run.open(), fence)
    assert len(waiting.result()) == 1


async def test_tickets_never_exceed_the_slots_and_number_the_tasks(run: Run):
    buffer, _ = await run.start(max_age=1, groups_per_step=3)
    first = await buffer.reserve("a", version=0, count=4, wait_s=0)
    second = await buffer.reserve("b", version=0, count=4, wait_s=0)
    assert [len(first), len(second)] == [4, 2]
    assert [ticket.task_index for ticket in first + second] == list(range(6))
    assert [ticket.id for ticket in first + second] == [f"t{number:09d}" for number in range(6)]
    assert {(ticket.version, ticket.attempt) for ticket in first + second} == {(0, 1)}
    assert await buffer.reserve("c", version=0, count=1, wait_s=0) == []


async def test_slots_return_with_the_release_and_not_before(run: Run):
    buffer, fence = await run.start(max_age=0, groups_per_step=2)
    for ticket in await buffer.reserve("w", version=0, count=2, wait_s=0):
        await buffer.commit("w", group(ticket))
    assert len(await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)) == 2
    assert await publish(buffer, fence) == 1
    assert await buffer.reserve("w", version=1, count=1, wait_s=0) == []
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(buffer.reserve("w", version=1, count=9, wait_s=60))
        await buffer.release(fence, 1)
    assert [ticket.version for ticket in waiting.result()] == [1, 1]


async def test_a_worker_behind_the_live_version_gets_nothing(run: Run):
    buffer, fence = await run.start()
    await publish(buffer, fence)
    assert await buffer.reserve("w", version=0, count=1, wait_s=0) == []
    assert [ticket.version for ticket in await buffer.reserve("w", version=1, count=1, wait_s=0)] == [1]


async def test_a_lost_lease_ends_the_ticket_and_rolls_its_task_again(run: Run):
    buffer, _ = await run.start(max_age=0, groups_per_step=1, lease_s=0.2)
    [lost] = await buffer.reserve("dead", version=0, count=1, wait_s=0)
    [again] = await buffer.reserve("alive", version=0, count=1, wait_s=60)
    assert (again.task_index, again.attempt) == (lost.task_index, 2)
    assert again.id != lost.id
    assert await buffer.renew("dead", [lost.id]) == {lost.id}
    assert await buffer.commit("dead", group(lost)) == "lease_lost"
    assert (await buffer.stats()).dropped["lease_lost"] >= 1


async def test_a_renewed_lease_outlives_one_that_is_not(run: Run):
    buffer, _ = await run.start(lease_s=2.0)
    kept, lost = await buffer.reserve("w", version=0, count=2, wait_s=0)
    await buffer.change_limits({"lease_s": 600})  # from here on a renewal lasts, however late the next would come
    assert await buffer.renew("w", [kept.id]) == set()

    async def is_lost() -> bool:
        return bool((await buffer.stats()).dropped)

    await eventually(is_lost, "the lease of the other ticket is lost")
    assert await buffer.renew("w", [kept.id, lost.id]) == {lost.id}
    assert await buffer.commit("w", group(kept)) == "stored"


async def test_only_the_owner_may_renew_commit_or_abandon(run: Run):
    buffer, _ = await run.start()
    [ticket] = await buffer.reserve("owner", version=0, count=1, wait_s=0)
    assert await buffer.renew("thief", [ticket.id]) == {ticket.id}
    assert await buffer.commit("thief", group(ticket)) == "lease_lost"
    await buffer.abandon("thief", ticket.id, "abandoned")
    assert await buffer.commit("owner", group(ticket)) == "stored"
    assert await buffer.commit("owner", group("t000000099")) == "lease_lost"


async def test_every_token_that_was_generated_has_one_fate(run: Run):
    buffer, fence = await run.start(max_age=1, groups_per_step=2)
    first, second, third, last = await buffer.reserve("w", version=0, count=4, wait_s=0)
    each = group(first).num_tokens
    await buffer.commit("w", group(third), keep=False)
    await buffer.commit("w", group(third), keep=False)
    await buffer.abandon("w", last.id, "failed", tokens=5)
    await buffer.abandon("w", last.id, "failed", tokens=5)
    await buffer.commit("w", group(first))
    await buffer.commit("w", group(second))
    stats = await buffer.stats()
    assert stats.tokens == {"generated": 3 * each + 5, "no_signal": each, "failed": 5}
    assert stats.tokens_in_flight == 2 * each
    await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
    assert (await buffer.stats()).tokens_in_flight == 2 * each
    await buffer.checkpoint(fence, 1)
    stats = await buffer.stats()
    assert stats.tokens["trained"] == 2 * each
    assert stats.tokens_in_flight == 0


async def test_a_commit_is_stored_once_whatever_became_of_it_since(run: Run):
    buffer, fence = await run.start(groups_per_step=1)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    assert await buffer.commit("w", group(ticket)) == "stored"
    assert await buffer.commit("w", group(ticket)) == "already"
    await buffer.take(fence, step=1, version=0, num_groups=1, wait_s=0)
    assert await buffer.commit("w", group(ticket)) == "already"
    await buffer.checkpoint(fence, 1)
    assert await buffer.commit("w", group(ticket)) == "already"
    stats = await buffer.stats()
    assert (stats.spent, stats.ready, stats.taken, stats.bytes) == (1, 0, 0, 0)


async def test_a_group_without_signal_is_dropped_and_its_task_is_done(run: Run):
    buffer, _ = await run.start()
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    assert await buffer.commit("w", group(ticket), keep=False) == "no_signal"
    assert await buffer.commit("w", group(ticket), keep=False) == "no_signal"
    assert (await buffer.stats()).dropped == {"no_signal": 1}
    [following] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    assert following.task_index == 1


def _with_sample(ticket: Ticket, **changed: object) -> RolloutGroup:
    sound = group(ticket)
    broken = replace(sample((ticket.version, ticket.version)), **changed)  # pyright: ignore[reportArgumentType]
    return replace(sound, rollouts=(replace(sound.rollouts[0], samples=(broken,)), sound.rollouts[1]))


BROKEN = {
    "unequal lengths": lambda ticket: _with_sample(ticket, token_ids=np.zeros(3, np.int32)),
    "a logprob is nan": lambda ticket: _with_sample(ticket, logprobs=np.array([0, 0, np.nan, -1], np.float32)),
    "a logprob above 0": lambda ticket: _with_sample(ticket, logprobs=np.array([0, 0, 0.1, -1], np.float32)),
    "spans do not cover": lambda ticket: _with_sample(ticket, versions=(VersionSpan(version=0, start=2, stop=3),)),
    "nothing sampled": lambda ticket: replace(group(ticket), rollouts=()),
    "reward is nan": lambda ticket: group(ticket, reward=math.nan),
    "older than its ticket": lambda ticket: group(ticket, versions=(ticket.version - 1, ticket.version)),
    "newer than the live version": lambda ticket: group(ticket, versions=(ticket.version, ticket.version + 1)),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
async def test_an_unsound_group_is_quarantined_and_its_task_rolled_again(run: Run, broken):
    buffer, fence = await run.start()
    await publish(buffer, fence)
    [ticket] = await buffer.reserve("w", version=1, count=1, wait_s=0)
    assert await buffer.commit("w", broken(ticket)) == "quarantined"
    assert await buffer.commit("w", broken(ticket)) == "quarantined"
    [again] = await buffer.reserve("w", version=1, count=1, wait_s=0)
    assert (again.task_index, again.attempt) == (ticket.task_index, 2)
    assert (await buffer.stats()).quarantined == 1
    assert (await buffer.audit()).is_clean


async def test_a_group_with_a_failed_sibling_is_sound(run: Run):
    buffer, _ = await run.start()
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    whole = group(ticket)
    failed = replace(whole.rollouts[1], samples=(), status=Status.FAILED, reward=math.nan)
    assert await buffer.commit("w", replace(whole, rollouts=(whole.rollouts[0], failed))) == "stored"


async def test_a_failing_task_is_given_up_and_an_abandoned_one_is_not(run: Run):
    buffer, _ = await run.start(max_attempts=2)
    tried: list[tuple[int, int]] = []
    for reason in ("abandoned", "abandoned", "failed", "failed", "failed"):
        [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
        tried.append((ticket.task_index, ticket.attempt))
        await buffer.abandon("w", ticket.id, reason)
        await buffer.abandon("w", ticket.id, reason)
    assert tried == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]
    assert (await buffer.stats()).dropped == {"abandoned": 2, "failed": 3}


async def test_a_task_of_a_detached_environment_leaves_the_redo_list(run: Run):
    buffer, _ = await run.start()
    for reason in ("abandoned", "detached"):
        [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
        assert ticket.task_index == 0
        await buffer.abandon("w", ticket.id, reason)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    assert ticket.task_index == 1
    assert (await buffer.stats()).dropped == {"abandoned": 1, "detached": 1}


async def test_two_runs_in_one_server_never_meet(run: Run):
    one, _ = await run.start()
    other, fence = await run.start("-other")
    [ticket] = await one.reserve("w", version=0, count=1, wait_s=0)
    await one.commit("w", group(ticket))
    assert (await other.stats()).issued == 0
    assert await other.take(fence, step=1, version=0, num_groups=1, wait_s=0) == []
    assert await other.commit("w", group(ticket)) == "lease_lost"


async def test_a_reservation_cancelled_at_any_point_leaks_no_ticket(run: Run):
    """The tickets of a cancelled call are returned by the worker's next call."""
    buffer, _ = await run.start()
    for turns in range(60):  # event-loop turns granted before the cut: from "not sent" to "already answered"
        reserving = asyncio.ensure_future(buffer.reserve("w", version=0, count=1, wait_s=1.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        reserving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            for ticket in await reserving:  # it completed before the cancellation
                await buffer.abandon("w", ticket.id, "abandoned")
        tickets = await buffer.reserve("w", version=0, count=1, wait_s=1.0)
        assert (await buffer.stats()).reserved == len(tickets) == 1
        await buffer.abandon("w", tickets[0].id, "abandoned")


async def test_a_call_for_no_tickets_returns_those_of_a_cancelled_one(run: Run):
    """A worker that stops asks so, in order to hand them back."""
    buffer, _ = await run.start()
    for turns in range(60):
        reserving = asyncio.ensure_future(buffer.reserve("w", version=0, count=1, wait_s=1.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        reserving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            for ticket in await reserving:
                await buffer.abandon("w", ticket.id, "abandoned")
        tickets = await buffer.reserve("w", version=0, count=0, wait_s=0)
        assert (await buffer.stats()).reserved == len(tickets)
        for ticket in tickets:
            await buffer.abandon("w", ticket.id, "abandoned")
