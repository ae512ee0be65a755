"""What the guard decides reaches buffer and ranks, and is kept over restarts with the same action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.learner import GuardConfig
from async_rl.errors import Diverged
from buffer.reference.memory_buffer import MemoryBuffer
from learner.guard.actions import TrainingGuard
from learner.step import StepResult

FAR, NEAR = 0.3, 0.9
"""Effective sample sizes outside of a band from 0.5 on, and well inside."""
RUN = Config.model_validate({
    "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
    "environments": [{"type": "counting"}],
    "staleness": {"max_age": 3},
    "batch": {"groups_per_step": 2},
})  # fmt: skip


@dataclass
class FakeRanks:
    learning_rate_scale: float = 1.0
    extra_state: dict[str, Any] = field(default_factory=dict)


def step(ess: float) -> StepResult:
    metrics = {"policy/ess": ess, "policy/kl_behave": 0.0, "policy/tokens": 9.0}
    return StepResult(loss=0.0, grad_norm=0.0, learning_rate=0.0, skipped=False, metrics=metrics)


async def life(buffer: MemoryBuffer, ranks: FakeRanks, action: str, *sizes: float) -> int:
    """Run one learner; return the number of slots at its end."""
    fence = await buffer.acquire("learner", RUN.limits)
    guard = GuardConfig.model_validate({"action": action, "min_ess": 0.5, "patience": 1, "recovery": 1})
    watch = TrainingGuard(guard, max_age=RUN.staleness.max_age, buffer=buffer, fence=fence, ranks=ranks)
    await watch.begin()
    for size in sizes:
        await watch.after(step(size), waited=0.5)
    await buffer.resign(fence)
    return (await buffer.stats()).slots


async def test_a_tighter_age_returns_with_the_guard_and_goes_with_it() -> None:
    buffer, ranks = MemoryBuffer(), FakeRanks()
    assert await life(buffer, ranks, "tighten_max_age") == 8
    assert await life(buffer, ranks, "tighten_max_age", FAR, FAR) == 4
    assert await life(buffer, ranks, "tighten_max_age") == 4
    assert await life(buffer, ranks, "tighten_max_age", NEAR) == 6
    assert await life(buffer, ranks, "off") == 8


async def test_the_state_of_one_action_does_not_apply_to_another() -> None:
    buffer, ranks = MemoryBuffer(), FakeRanks()
    await life(buffer, ranks, "lower_learning_rate", FAR, FAR)
    assert ranks.learning_rate_scale == 0.25
    ranks.learning_rate_scale = 1.0
    await life(buffer, ranks, "lower_learning_rate")
    assert ranks.learning_rate_scale == 0.25
    assert await life(buffer, ranks, "tighten_max_age") == 8
    assert ranks.learning_rate_scale == 1.0


async def test_the_end_is_said_in_a_sentence() -> None:
    with pytest.raises(Diverged, match=r"policy/ess 0\.3 is below learner\.guard\.min_ess 0\.5"):
        await life(MemoryBuffer(), FakeRanks(), "stop", FAR)
