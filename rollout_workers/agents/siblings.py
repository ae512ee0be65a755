"""Plays the siblings of a group at once, for agents that then look at all of them."""

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
    """One rollout per context, in their order. One that broke is a failed rollout; the others are kept.

    `roll` plays one of them; the deadline is that of the whole group.
    """
    single = _Single(agent, roll)
    async with asyncio.TaskGroup() as episodes:
        playing = [episodes.create_task(play(single, task, inference, context, timeout_s=math.inf)) for context in contexts]
    return [episode.result() for episode in playing]


class _Single:
    """An agent whose episodes are played by a function."""

    def __init__(self, agent: Agent, roll: RolloutFunction) -> None:
        self.task = agent.task
        self._roll = roll

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        return await self._roll(task, inference, context)
