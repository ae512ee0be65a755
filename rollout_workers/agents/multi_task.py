"""Several agents as one, where a single agent is expected: in a mix, an evaluation, an environment server.

    environments:
      - type: multi_task
        args: {environments: [{type: counting, weight: 3}, {type: even_digits}, {type: nim, evaluation_only: true}]}

Tasks are distributed as those of a run are. A task's environment is `WHOLE.MEMBER`, here `multi_task.counting`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ValidationError

from async_rl.board.environment_mix import PERIOD, apportion, interleave
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.imports.old_names import old_names
from async_rl.protocols import Agent, EpisodeContext, FiniteAgent, GroupAgent, InferenceInterface
from async_rl.types import Rollout, Task
from rollout_workers.agents.siblings import play_siblings
from rollout_workers.environment_pool import opened
from rollout_workers.registry import build_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTaskMember:
    """One agent of a multi-task agent."""

    name: str
    agent: Agent
    weight: float = 1.0
    evaluation_only: bool = False
    """Leave its tasks out unless `for_evaluation` is set."""
    max_in_flight: int | None = None
    """Maximum number of its episodes at once; of its groups if it plays siblings together."""


class WeightedMultiTask:
    """Distribute tasks by weight (largest remainder), evenly spread; each member sees its own stream 0, 1, 2, ...

    Make one with `multi_task(...)`. `async with` enters the members that are async context managers.
    """

    def __init__(self, members: Sequence[MultiTaskMember], *, name: str, for_evaluation: bool = False) -> None:
        self.name = name
        dealt = [member for member in members if for_evaluation or not member.evaluation_only]
        if not dealt:
            raise ConfigError(f"{name!r} has no environment to train on: all of its members are evaluation_only")
        self._members = {f"{name}.{member.name}": member for member in dealt}
        if len(self._members) < len(dealt):
            raise ConfigError(f"two members of {name!r} have the same name: give one of them another `name`")
        self._shares = apportion([member.weight for member in dealt], PERIOD)
        self._round = interleave(self._shares)
        self._limits = {
            label: asyncio.Semaphore(member.max_in_flight) if member.max_in_flight is not None else nullcontext()
            for label, member in self._members.items()
        }

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as entered:
            for member in self._members.values():
                await entered.enter_async_context(opened(member.agent))
            self._opened = entered.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._opened.aclose()

    @property
    def num_tasks(self) -> int | None:
        """Number of indexes that cover every task of every member; short tables repeat. None: some tasks never end."""
        needed = [self._index_of_last(chosen, member.agent) for chosen, member in enumerate(self._members.values())]
        return None if None in needed else 1 + max(index for index in needed if index is not None)

    def _index_of_last(self, chosen: int, agent: Agent) -> int | None:
        num_tasks = agent.num_tasks if isinstance(agent, FiniteAgent) else None
        if num_tasks is None:
            return None
        rounds, earlier = divmod(num_tasks - 1, self._shares[chosen])
        return rounds * PERIOD + self._round.index((chosen, earlier))

    def task(self, index: int) -> Task:
        rounds, place = divmod(index, PERIOD)
        chosen, earlier = self._round[place]
        label, member = list(self._members.items())[chosen]
        return replace(member.agent.task(rounds * self._shares[chosen] + earlier), environment=label)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        member = self._members[task.environment]
        async with self._limits[task.environment]:
            return await member.agent.rollout(replace(task, environment=member.name), inference, context)


class GroupedMultiTask(WeightedMultiTask):
    """A multi-task agent some of whose members play the siblings of a task together."""

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        member = self._members[task.environment]
        if not isinstance(member.agent, GroupAgent):
            return await play_siblings(self.rollout, task, inference, contexts)
        async with self._limits[task.environment]:
            return await member.agent.rollout_group(replace(task, environment=member.name), inference, contexts)


def multi_task(members: Sequence[MultiTaskMember], *, name: str, for_evaluation: bool = False) -> WeightedMultiTask:
    """Make a multi-task agent; a GroupAgent if one of its members is."""
    plays_groups = any(isinstance(member.agent, GroupAgent) for member in members)
    kind = GroupedMultiTask if plays_groups else WeightedMultiTask
    return kind(members, name=name, for_evaluation=for_evaluation)


def from_config(
    *, name: str, seed: int, environments: Sequence[Mapping[str, Any]], for_evaluation: bool = False
) -> WeightedMultiTask:
    """Make it from `environments`, sections as under a run's `environments`."""
    members = [_member(name, each, seed) for each in environments]
    return multi_task(members, name=name, for_evaluation=for_evaluation)


def _member(whole: str, written: Mapping[str, Any], seed: int) -> MultiTaskMember:
    try:
        section = EnvironmentConfig.model_validate(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"an environment of {whole!r} is written wrongly: {place}: {first['msg']}") from error
    return MultiTaskMember(
        name=section.label,
        agent=build_agent(section, seed),
        weight=section.weight,
        evaluation_only=section.evaluation_only,
        max_in_flight=section.max_in_flight,
    )


__getattr__ = old_names(__name__)
