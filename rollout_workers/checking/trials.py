"""Play a few episodes of an environment as a worker would, and record what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_rl.config.rollout import EnvironmentConfig, WorkerConfig
from async_rl.errors import ConfigError
from async_rl.protocols import Agent, EpisodeContext, GenerationArgs, GroupAgent, InferenceInterface, Prompt
from async_rl.types import Completion, Failure, Rollout, Task, Ticket
from rollout_workers.checking.purity import asked_again, asked_elsewhere
from rollout_workers.checking.stalls import EnvironmentStall, processes_left, stalls_of
from rollout_workers.environment_pool import opened
from rollout_workers.episodes.episode import play, play_group, pose_task
from rollout_workers.episodes.leaked_tasks import run_episode, track_episode_tasks
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.episodes.watched_inference import WatchedInference
from rollout_workers.registry import build_agent

Answerers = Callable[[Task], Sequence[tuple[str, InferenceInterface]]]
"""Returns the inferences that answer a task, each with a name for the answer: right, wrong, nothing, the model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One episode."""

    task: Task
    answer: str
    rollout: Rollout
    seconds: float
    generating_s: float
    """Time spent in generations; the sum over siblings that play together."""


@dataclass(slots=True, kw_only=True)
class EnvironmentTrials:
    """What was observed of one environment."""

    section: EnvironmentConfig
    tasks: list[Task] = field(default_factory=list)
    not_posed: list[Failure] = field(default_factory=list)
    impurities: list[str] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    stalls: list[EnvironmentStall] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """How the episodes of a check are played."""

    worker: WorkerConfig
    group_size: int
    seed: int
    context: EpisodeContext
    """Context of the episodes, with gateway and policies."""


async def try_environment(
    section: EnvironmentConfig, settings: TrialSettings, count: int, answerers: Answerers
) -> EnvironmentTrials:
    seen = EnvironmentTrials(section=section)

    def note(_environment: str, what: str, names: Sequence[str]) -> None:
        seen.leaked += [f"the task {name}" for name in names]

    # Only tasks that the environment starts count as leaks, not those of the gateway's connections.
    with processes_left() as processes, stalls_of(section.label) as seen.stalls, track_episode_tasks(note):
        agent = build_agent(section, settings.seed)
        await run_episode(_play_tasks(seen, agent, settings, count, answerers), environment=section.label, name=section.label)
    seen.leaked += processes
    if not seen.not_posed and not seen.impurities:
        seen.impurities = await asked_elsewhere(section, settings.seed, seen.tasks)
    return seen


async def _play_tasks(seen: EnvironmentTrials, agent: Agent, settings: TrialSettings, count: int, answerers: Answerers) -> None:
    async with opened(agent):
        for index in range(count):
            await _play_task(seen, agent, index, settings, answerers)
        if not seen.not_posed:
            seen.impurities = await asked_again(agent, seen.tasks)
    await asyncio.sleep(0)  # let tasks cancelled last end


async def _play_task(seen: EnvironmentTrials, agent: Agent, index: int, settings: TrialSettings, answerers: Answerers) -> None:
    task = await pose_task(TaskSource(environment=seen.section, agent=agent, index=index), settings.worker.timeouts)
    if isinstance(task, Failure):
        seen.not_posed.append(task)
        return
    seen.tasks.append(task)
    for sibling, (answer, inference) in enumerate(answerers(task)):
        ticket = Ticket(id=f"check-{index}", task_index=index, version=0, attempt=1)
        context = replace(settings.context, ticket=ticket, sibling=sibling, seed=sibling)
        watch = TimedInference(inference)
        began = time.monotonic()
        rollouts = await _play(agent, task, watch, context, settings)
        seconds = time.monotonic() - began
        seen.trials += [
            Trial(task=task, answer=answer, rollout=rollout, seconds=seconds, generating_s=watch.seconds)
            for rollout in rollouts
        ]


async def _play(
    agent: Agent, task: Task, inference: InferenceInterface, context: EpisodeContext, settings: TrialSettings
) -> Sequence[Rollout]:
    limits: Any = {"timeout_s": settings.worker.episode_timeout_s, "timeouts": settings.worker.timeouts}
    if isinstance(agent, GroupAgent):
        contexts = [replace(context, sibling=sibling, seed=sibling) for sibling in range(settings.group_size)]
        return await play_group(agent, task, inference, contexts, **limits)
    return [await play(agent.rollout, task, inference, context, **limits)]


class TimedInference(WatchedInference):
    """Measures the time of generations."""

    seconds = 0.0

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        began = time.monotonic()
        try:
            return await super()._generate(prompt, args)
        finally:
            self.seconds += time.monotonic() - began


def chosen(sections: Sequence[EnvironmentConfig], word: str, **described: Any) -> Sequence[EnvironmentConfig]:
    """The environments of a configuration named by `word`: all if empty; a type that is not configured is added."""
    if not word:
        return sections
    named = [section for section in sections if section.label == word]
    if named and described:
        raise ConfigError(f"{word} is in the configuration with its own arguments: leave out --args, or name a type")
    return named if named else [EnvironmentConfig(type=word, **described)]
