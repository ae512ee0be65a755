"""Reward functions written for TRL's GRPOTrainer, unchanged.

    def concise(prompts, completions, **columns) -> list[float]: ...

    environment = trl_rewards(concise, correct, dataset=rows)        environments: [{type: my_rewards.py:environment}]

A function gets all answers to one task at once; the columns of the task's row are repeated for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext
from async_rl.types import Rollout, Task
from rollout_workers.adapters.task_rows import Rows, RowTasks
from rollout_workers.agents.group_reward import GroupRewardAgent
from rollout_workers.episodes.rewards import Score
from rollout_workers.user_functions import call_user_function

TrlValues = Sequence[float | None]
TrlReward = Callable[..., TrlValues | Awaitable[TrlValues]]


@dataclass(kw_only=True)
class TrlRewardsAgent(RowTasks, GroupRewardAgent):
    functions: Sequence[TrlReward]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.functions) != len(self.weights) or not self.functions:
            raise ConfigError(
                f"environment {self.name!r} has {len(self.functions)} reward functions and {len(self.weights)} weights: "
                "give at least one function, and one weight for each"
            )

    async def group_reward(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> list[Score]:
        given = self._given(task, rollouts)
        try:
            async with asyncio.TaskGroup() as functions:
                running = [functions.create_task(_values(function, given)) for function in self.functions]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # report the first function that raised
        return [self._score(values) for values in zip(*(each.result() for each in running), strict=True)]

    def _given(self, task: Task, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Keyword arguments of a reward function, each with one entry per rollout."""
        columns = self.columns(task)
        prompt, is_text = columns.pop("prompt"), isinstance(task.prompt, str)
        answers = [rollout.conversation[-1].content for rollout in rollouts]
        return {
            **{name: [value] * len(rollouts) for name, value in columns.items()},
            "prompts": [prompt] * len(rollouts),
            "completions": answers if is_text else [[{"role": "assistant", "content": answer}] for answer in answers],
            "completion_ids": [_sampled_ids(rollout) for rollout in rollouts],
        }

    def _score(self, values: Sequence[float | None]) -> Score:
        """Sum the weighted values. None means that a function does not apply to this task."""
        given = zip(self.functions, self.weights, values, strict=True)
        applying = [(_name(function), weight, float(value)) for function, weight, value in given if value is not None]
        if not applying:
            raise ValueError("every reward function returned None")
        parts = {name: value for name, _, value in applying}
        return Score(reward=sum(weight * value for _, weight, value in applying), parts=parts)


def trl_rewards(*functions: TrlReward, dataset: Rows, weights: Sequence[float] | None = None) -> Callable[..., TrlRewardsAgent]:
    """Make an environment of reward functions. `dataset` has a column `prompt`; the default weight is 1."""
    chosen = weights if weights is not None else [1.0] * len(functions)

    def make(*, name: str, seed: int = 0) -> TrlRewardsAgent:
        return TrlRewardsAgent(name=name, seed=seed, rows=dataset, functions=functions, weights=chosen)

    return make


async def _values(function: TrlReward, given: dict[str, Any]) -> TrlValues:
    values, count = await call_user_function(function, **given), len(given["prompts"])
    if len(values) != count:
        raise ValueError(f"{_name(function)} returned {len(values)} rewards for {count} completions")
    return values


def _name(function: TrlReward) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _sampled_ids(rollout: Rollout) -> list[int]:
    return [int(token) for sample in rollout.samples for token in sample.token_ids[sample.loss_mask == 1]]
