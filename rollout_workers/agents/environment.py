"""The environment: tasks, rewards and observations. `RewardOnlyAgent` plays it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from async_rl.types import Task, Turn
from rollout_workers.agents.dialogue import Observation
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.rewards import Score

RewardValue = float | Score | Awaitable[float | Score]
"""What a reward method returns; it may be plain or async."""


@dataclass(kw_only=True)
class Environment(TaskStream):
    """Subclass it with `task` and `reward`; for several turns add `get_observation` and `trajectory_reward`.

    An environment poses and scores, an agent plays the episodes. A subclass that also defines `rollout` is both.
    """

    max_turns = 64
    """The episode ends after this many generations."""
    length_is_truncation = True
    """Whether an episode whose last answer ran into its length limit counts as truncated."""

    def reward(self, task: Task, response: str) -> RewardValue:
        """Score the last answer."""
        raise NotImplementedError(f"{type(self).__name__} must define reward or trajectory_reward")

    def trajectory_reward(self, task: Task, turns: Sequence[Turn]) -> RewardValue:
        """Score the whole episode. By default, the reward of its last answer."""
        return self.reward(task, turns[-1].text)

    def get_observation(self, task: Task, turns: Sequence[Turn]) -> Observation | Awaitable[Observation | None] | None:
        """Answer the last turn; None ends the episode."""
        return None
