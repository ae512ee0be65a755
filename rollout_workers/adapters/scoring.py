"""Score an agent's output with a reward function of the user."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.types import Task
from rollout_workers.episodes.rewards import RewardFailed, Score, as_score
from rollout_workers.episodes.stage_timeouts import stage
from rollout_workers.user_functions import awaited

RewardFunction = Callable[[Task, Any], float | Score | Awaitable[float | Score]]


async def score_of(reward: RewardFunction | None, task: Task, output: Any) -> Score:
    """Score the output; without a reward function it is the reward itself. Raises RewardFailed."""
    try:
        async with stage("reward"):
            return as_score(output if reward is None else await awaited(reward(task, output)))
    except Exception as error:
        raise RewardFailed from error
