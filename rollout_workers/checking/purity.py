"""Check that `task(index)` returns the same task whenever and wherever it is called, as retries require."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import Agent
from async_rl.types import Task
from rollout_workers.environment_pool import opened
from rollout_workers.graders import GraderDied, GraderRaised, GraderTimeout, in_process
from rollout_workers.registry import build_agent
from rollout_workers.user_functions import awaited

START_S = 120.0
"""Time limit for a process that imports the environment."""


async def asked_again(agent: Agent, tasks: Sequence[Task]) -> list[str]:
    """Pose the tasks again in this process; return the differences. `tasks` are those of the indexes 0, 1, 2, ..."""
    again = await _tasks(agent, len(tasks))
    return [f"task({index}) is a different task the second time: `task` must be pure" for index in _differing(tasks, again)]


async def asked_elsewhere(section: EnvironmentConfig, seed: int, tasks: Sequence[Task]) -> list[str]:
    """Pose the tasks in a fresh process; return the differences."""
    try:
        elsewhere = await in_process(digests, section.model_dump(mode="json"), seed, len(tasks), timeout_s=START_S)
    except (GraderRaised, GraderDied, GraderTimeout) as error:
        return [f"another process cannot pose the same tasks: {error}"]
    why = "does it use hash(), the order of a set, or outside state?"
    differing = _differing(list(map(_digest, tasks)), elsewhere)
    return [f"task({index}) is a different task in another process: {why}" for index in differing]


def digests(section: dict[str, Any], seed: int, count: int) -> list[str]:
    async def all_of_them() -> list[Task]:
        agent = build_agent(EnvironmentConfig.model_validate(section), seed)
        async with opened(agent):
            return await _tasks(agent, count)

    return list(map(_digest, asyncio.run(all_of_them())))


async def _tasks(agent: Agent, count: int) -> list[Task]:
    """Pose the tasks in reverse order, which must not matter either."""
    return [await awaited(agent.task(index)) for index in reversed(range(count))][::-1]


def _digest(task: Task) -> str:
    words = json.dumps(asdict(task), sort_keys=True, default=repr)
    return blake2b(words.encode(), digest_size=12).hexdigest()


def _differing(one: Iterable[object], other: Iterable[object]) -> list[int]:
    return [index for index, (mine, yours) in enumerate(zip(one, other, strict=True)) if mine != yours]
