"""Play the siblings of a group concurrently, for agents that then compare them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Task
from rollout_workers.episodes.episode import RolloutFunction, play


async def play_siblings(
    rollout: RolloutFunction, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
) -> list[Rollout]:
    """Return one rollout per context, in their order. An episode that raises becomes a failed rollout.

    `rollout` plays one of them. They have no deadline but the group's.
    """
    async with asyncio.TaskGroup() as episodes:
        playing = [episodes.create_task(play(rollout, task, inference, context, timeout_s=math.inf)) for context in contexts]
    return [episode.result() for episode in playing]
