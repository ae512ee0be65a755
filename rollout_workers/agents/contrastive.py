"""Agents that return pairs of a chosen and a rejected rollout.

Siblings 2n and 2n + 1 are pair n of their group. `metrics["chosen"]` is 1 or 0 and says which of the two a rollout is.
With batch.group_size 2, the objective `online_dpo` compares the two; group baselines train on their rewards.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Status, Task
from rollout_workers.agents.environment import RewardValue
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.agents.siblings import play_siblings


@dataclass(kw_only=True)
class BestAndWorstAgent(RewardOnlyAgent):
    """Play several episodes for each pair, keep the best and the worst. Subclass it with `task` and `reward`."""

    candidates: int = 4
    """Episodes played for each pair."""

    def __post_init__(self) -> None:
        if self.candidates < 2:
            raise ValueError(f"candidates must be at least 2, got {self.candidates}")

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        if len(contexts) % 2:
            raise ValueError(f"pairs need an even batch.group_size, got {len(contexts)}")
        async with asyncio.TaskGroup() as pairs:
            playing = [pairs.create_task(self._pair(task, inference, context)) for context in contexts[::2]]
        return [
            _marked(rollout, sibling)
            for sibling, rollout in enumerate(rollout for pair in playing for rollout in pair.result())
        ]

    async def _pair(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> tuple[Rollout, Rollout]:
        contexts = [replace(context, seed=context.seed + candidate) for candidate in range(self.candidates)]
        candidates = await play_siblings(self.rollout, task, inference, contexts)
        scored = sorted((one for one in candidates if one.status is not Status.FAILED), key=lambda one: one.reward)
        if len(scored) < 2:
            broken = next(one for one in candidates if one.status is Status.FAILED)
            return broken, broken
        worst, best = scored[0], scored[-1]
        if worst.reward == best.reward:  # no preference: part of the baseline, not of the loss
            return replace(best, status=Status.MASKED), replace(worst, status=Status.MASKED)
        return best, worst


@dataclass(kw_only=True)
class TwoPromptsAgent(RewardOnlyAgent):
    """Ask with a preferred prompt and with another one, such as with and without a hint.

    Subclass it with `task`, `chosen` and `rejected`. The reward is 1 for chosen and 0 for rejected, unless you define one.
    """

    @abstractmethod
    def chosen(self, task: Task) -> str | tuple[Message, ...]:
        """Return the prompt of the preferred answer."""

    @abstractmethod
    def rejected(self, task: Task) -> str | tuple[Message, ...]:
        """Return the prompt of the rejected answer."""

    def reward(self, task: Task, response: str) -> RewardValue:
        return float(task.data["chosen"])

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        is_chosen = context.sibling % 2 == 0
        prompt = self.chosen(task) if is_chosen else self.rejected(task)
        asked = replace(task, prompt=prompt, data={**task.data, "chosen": is_chosen})
        return _marked(await super().rollout(asked, inference, context), context.sibling)


def _marked(rollout: Rollout, sibling: int) -> Rollout:
    return replace(rollout, metrics={**rollout.metrics, "pair": sibling // 2, "chosen": 1 - sibling % 2})
