"""Play the siblings of a group concurrently, for agents that then compare them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from async_rl.protocols import Agent, EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Task
from rollout_workers.episodes.episode import play

RolloutFunction = Callable[[Task, InferenceInterface, EpisodeContext], Awaitable[Rollout]]


async def play_siblings(
    agent: Agent, roll: RolloutFunction, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
) -> list[Rollout]:
    """Return one rollout per context, in their order. An episode that raises becomes a failed rollout.

    `roll` plays one of them. They have no deadline but the group's.
    """
    single = _FunctionAgent(agent, roll)
    async with asyncio.TaskGroup() as episodes:
        playing = [episodes.create_task(play(single, task, inference, context, timeout_s=math.inf)) for context in contexts]
    return [episode.result() for episode in playing]


class _FunctionAgent:
    """An agent whose episodes a function plays."""

    def __init__(self, agent: Agent, roll: RolloutFunction) -> None:
        self.task = agent.task
        self._roll = roll

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        return await self._roll(task, inference, context)
