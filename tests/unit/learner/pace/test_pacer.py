"""The pacer over the reference buffer: which paces it sets, and what it logs of them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from async_rl.config import BatchConfig, Config
from async_rl.config.buffer import StalenessConfig
from buffer.reference.memory_buffer import MemoryBuffer
from learner.batches.batch import pack_batch
from learner.objective import load_objective
from learner.pace.controller import RAISED_BY, STEPS_BEFORE_PAUSE, WINDOW
from learner.pace.pacer import Pacer
from learner.prefetch import Prefetcher
from tests.support.groups import group
from tests.support.runs import publish, started
from tests.support.waiting import eventually

GROUPS = 2


def config(**sections: Any) -> Config:
    model = {"size": {"hidden": 32, "layers": 1, "heads": 2}}
    batch = {"groups_per_step": GROUPS}
    staleness = {"max_age": 8, **sections.pop("staleness", {})}
    return Config.model_validate(
        {"environments": [{"type": "counting"}], "model": model, "batch": batch, "staleness": staleness, **sections}
    )


async def paces(run: Config, steps: int) -> list[float]:
    """The pace in force after each step of a run whose workers hold nothing."""
    buffer, found = MemoryBuffer(), list[float]()
    fence = await buffer.acquire("learner", run.limits)
    await buffer.recover(fence, None)
    pacer = Pacer(run, buffer=buffer, fence=fence)
    await pacer.begin()
    for step in range(1, steps + 1):
        before = await buffer.stats()
        row = await pacer.after(before, step=step, unreleased_steps=0, waits=False)
        assert row["pace/slots"] == before.slots
        found.append((await buffer.stats()).slots / GROUPS)
    return found


async def test_the_pace_is_raised_before_each_evaluation():
    every = WINDOW + 4
    found = await paces(config(evaluation={"every": every}), 2 * every)
    usual, raised = [2.0] * (every - STEPS_BEFORE_PAUSE - 1), [2.0 + RAISED_BY] * STEPS_BEFORE_PAUSE
    assert found == [*usual, *raised, 2.0] * 2


async def test_evaluations_after_every_few_steps_are_not_prepared_for():
    assert set(await paces(config(evaluation={"every": WINDOW}), 3 * WINDOW)) == {2.0}


async def test_a_fixed_pace_stays():
    assert set(await paces(config(staleness={"pace": 3.0}, evaluation={"every": 20}), 40)) == {3.0}


async def test_the_learner_is_held_back_while_an_unfinished_group_would_become_too_old():
    run, buffer = config(staleness={"max_age": 1}), MemoryBuffer()
    fence = await started(buffer, max_age=1, groups_per_step=GROUPS)
    prefetcher = Prefetcher(
        buffer=buffer,
        fence=fence,
        batch=BatchConfig(groups_per_step=GROUPS, group_size=2),
        staleness=StalenessConfig(max_age=1),
        pack=partial(pack_batch, objective=load_objective("async_default"), capacity=BatchConfig().bin_tokens),
        num_workers=lambda: 1,
    )
    pacer = Pacer(run, buffer=buffer, fence=fence)

    async def held_back(pacer: Pacer = pacer) -> bool:
        row = await pacer.after(await buffer.stats(), step=1, unreleased_steps=0, waits=prefetcher.waits)
        return row["pace/held_back"] == 1.0

    [straggler, spare] = await buffer.reserve("slow", version=0, count=2, wait_s=0)
    await publish(buffer, fence)
    async with asyncio.TaskGroup() as tasks:
        fetch = tasks.create_task(prefetcher.fetch(1, 1))

        async def waits() -> bool:
            return prefetcher.waits

        await eventually(waits, "the groups are asked for")
        assert not await held_back(), "nothing is ready"
        for ticket in await buffer.reserve("fast", version=1, count=GROUPS, wait_s=0):
            await buffer.commit("fast", group(ticket))
        assert await held_back()
        shares = config(staleness={"max_age": 1}, environments=[{"type": "counting", "max_share": 0.5}, {"type": "nim"}])
        assert not await held_back(Pacer(shares, buffer=buffer, fence=fence)), "a share may be what the batch waits for"
        for ticket in (straggler, spare):
            await buffer.commit("slow", group(ticket))
        batch = await fetch
    assert {taken.group.id for taken in batch.groups} == {straggler.id, spare.id}
    assert not await held_back(), "enough are ready, and nothing is waited for"
