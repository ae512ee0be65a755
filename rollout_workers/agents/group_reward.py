"""Rewards that compare the siblings of a group: a ranking, a tournament, a judge that sees all answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Status, Task
from rollout_workers.agents.environment import RewardValue
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.agents.siblings import play_siblings
from rollout_workers.episodes.rewards import Score, as_score
from rollout_workers.episodes.stage_timeouts import scoring
from rollout_workers.user_functions import awaited

GroupScores = Sequence[float | Score]


@dataclass(kw_only=True)
class GroupRewardAgent(RewardOnlyAgent):
    """Subclass it with `task` and `group_reward`. `reward` may give each answer a value to compare."""

    @abstractmethod
    def group_reward(
        self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext
    ) -> GroupScores | Awaitable[GroupScores]:
        """Return one reward for each rollout, in their order. Failed rollouts are left out.

        `context` is the first sibling's: a judge may be one of its `policies`.
        """

    def reward(self, task: Task, response: str) -> RewardValue:
        """Value of an answer by itself: `rollout.reward` until the group is scored."""
        return 0.0

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play a group of one."""
        (alone,) = await self.rollout_group(task, inference, [context])
        return alone

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        rollouts = await play_siblings(super().rollout, task, inference, contexts)
        played = [place for place, rollout in enumerate(rollouts) if rollout.status is not Status.FAILED]
        if not played:
            return rollouts
        scores = await self._scores(task, [rollouts[place] for place in played], contexts[0])
        for place, score in zip(played, scores, strict=True):
            parts = {**rollouts[place].reward_parts, **score.parts}
            rollouts[place] = replace(rollouts[place], reward=score.reward, reward_parts=parts)
        return rollouts

    async def _scores(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> list[Score]:
        async with scoring():
            scores = [as_score(score) for score in await awaited(self.group_reward(task, rollouts, context))]
            if len(scores) != len(rollouts):
                raise ValueError(f"group_reward returned {len(scores)} rewards for {len(rollouts)} rollouts")
        return scores


def ranked(values: Sequence[float]) -> list[float]:
    """Map values to ranks, equally spaced from 0 (lowest) to 1 (highest); equal values share their mean rank."""
    if len(values) < 2:
        return [0.0] * len(values)
    return [
        (sum(other < value for other in values) + sum(other == value for other in values) / 2 - 0.5) / (len(values) - 1)
        for value in values
    ]
