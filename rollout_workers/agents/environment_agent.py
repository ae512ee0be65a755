"""Play an environment that has no agent of its own: any object with `task` and `reward`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Self

from async_rl.types import Task
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.environment_pool import opened

TAKEN_OVER = (
    "reward",
    "trajectory_reward",
    "get_observation",
    "generation_args",
    "max_turns",
    "length_is_truncation",
    "num_tasks",
)
"""What the agent uses of the environment, where it has it."""


class EnvironmentAgent(RewardOnlyAgent):
    """Plays the episodes of `environment`, which is entered with the agent if it is an async context manager."""

    def __init__(self, environment: Any, *, name: str, seed: int) -> None:
        super().__init__(name=name, seed=seed)
        self.environment = environment
        for attribute in TAKEN_OVER:
            if hasattr(environment, attribute):
                setattr(self, attribute, getattr(environment, attribute))

    def task(self, index: int) -> Task:
        return self.environment.task(index)

    async def __aenter__(self) -> Self:
        self._entered = AsyncExitStack()
        await self._entered.enter_async_context(opened(self.environment))
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._entered.aclose()
