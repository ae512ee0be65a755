"""The pacer over the reference buffer: which paces it sets, and what it logs of them."""

from __future__ import annotations

from typing import Any

from async_rl.config import Config
from buffer.reference.memory_buffer import MemoryBuffer
from learner.pace.controller import RAISED_BY, STEPS_BEFORE_PAUSE, WINDOW
from learner.pace.pacer import Pacer

GROUPS = 2


def config(**sections: Any) -> Config:
    model = {"size": {"hidden": 32, "layers": 1, "heads": 2}}
    batch = {"groups_per_step": GROUPS}
    staleness = {"max_age": 8, **sections.pop("staleness", {})}
    return Config.model_validate(
        {"model": model, "environments": [{"type": "counting"}], "batch": batch, "staleness": staleness, **sections}
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
        row = await pacer.after(before, step=step, unreleased_steps=0)
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
