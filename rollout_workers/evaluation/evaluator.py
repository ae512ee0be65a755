"""Play a fixed set of tasks with one inference and collect the results.

environments x tasks x (samples + a greedy one) ──▶ jobs ──▶ concurrent players ──▶ TaskResults, in order
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

import structlog

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, FiniteAgent, Gateway, GenerationArgs, GroupAgent, InferenceInterface
from async_rl.types import Failure, Rollout, Task, Ticket
from rollout_workers.environment_pool import opened
from rollout_workers.episodes.episode import play, play_group, pose_task
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.inference.evaluation_inference import EvaluationInference
from rollout_workers.registry import build_agent

log = structlog.get_logger()

GREEDY = GenerationArgs(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskResult:
    """All rollouts of one task."""

    task: Task
    samples: Sequence[Rollout]
    greedy: Rollout | None = None


@asynccontextmanager
async def open_environments(config: Config) -> AsyncGenerator[list[TaskSource]]:
    """Open the environments to evaluate, made with the seed of the evaluation."""
    chosen = config.evaluation.environments
    async with AsyncExitStack() as held:
        sources: list[TaskSource] = []
        for section in config.environments:
            if not chosen or section.label in chosen:
                agent = build_agent(section, config.evaluation.seed)
                await held.enter_async_context(opened(agent))
                sources.append(TaskSource(environment=section, agent=agent, index=0))
        yield sources


@dataclass
class Evaluator:
    sources: Sequence[TaskSource]
    config: Config
    inference: InferenceInterface
    policies: Mapping[str, InferenceInterface]
    gateway: Gateway | None = None

    def __post_init__(self) -> None:
        self._settings, self._worker = self.config.evaluation, self.config.worker
        self._warned: set[str] = set()
        """Environments already warned about: they have fewer tasks than requested."""
        self._places = {
            source.environment.label: asyncio.Semaphore(most)
            for source in self.sources
            if (most := source.environment.max_in_flight) is not None
        }

    async def evaluate(self) -> list[TaskResult]:
        """Play all episodes. Failed ones are part of the result. Raises ConfigError when `task()` fails."""
        tasks = [pending for source in self.sources for pending in await self._pending_tasks(source)]
        sampled = EvaluationInference(self.inference)
        greedy = EvaluationInference(self.inference, always=GREEDY)
        jobs = (job for pending in tasks for job in self._jobs(pending, sampled, greedy))
        async with asyncio.TaskGroup() as players:
            for _ in range(self._settings.episodes_in_flight):
                players.create_task(self._play_all(jobs))
        return [pending.result(self._settings.samples) for pending in tasks]

    async def _pending_tasks(self, source: TaskSource) -> Iterable[_PendingTask]:
        """Collect the requested number of different tasks, or all there are: a repeated row adds nothing."""
        label = source.environment.label
        asked = self._settings.tasks_of(label)
        num_tasks = source.agent.num_tasks if isinstance(source.agent, FiniteAgent) else None
        if asked == "all":
            if num_tasks is None:
                raise ConfigError(
                    f"evaluation.tasks is `all`, but the tasks of environment {label!r} have no end: give a number"
                )
            asked = num_tasks
        found: dict[tuple[str, str], _PendingTask] = {}
        for index in range(num_tasks if num_tasks is not None else asked):
            if len(found) == asked:
                break
            posed = replace(source, index=index)
            task = await pose_task(posed, self._worker.timeouts)
            if isinstance(task, Failure):
                raise ConfigError(f"environment {label!r} cannot pose task {index}: {task.kind}: {task.message}")
            found.setdefault((task.environment, task.key), _PendingTask(source=posed, task=task))
        if len(found) < asked and label not in self._warned:
            self._warned.add(label)
            log.warning(f"environment {label!r} has {len(found)} different tasks of the {asked} asked for: all are evaluated")
        return found.values()

    def _jobs(self, pending: _PendingTask, sampled: InferenceInterface, greedy: InferenceInterface) -> Iterator[_EpisodeJob]:
        """Jobs of single episodes, or of a whole group for agents that play siblings together. Those have no greedy pass,
        because identical answers cannot be compared.
        """
        samples = range(self._settings.samples)
        if isinstance(pending.source.agent, GroupAgent):
            yield _EpisodeJob(pending=pending, siblings=samples, inference=sampled)
            return
        yield from (_EpisodeJob(pending=pending, siblings=[sibling], inference=sampled) for sibling in samples)
        if self._settings.greedy:
            yield _EpisodeJob(pending=pending, siblings=[len(samples)], inference=greedy)

    async def _play_all(self, jobs: Iterator[_EpisodeJob]) -> None:
        """One of several concurrent players of the same jobs."""
        for job in jobs:
            async with self._places.get(job.pending.source.environment.label, nullcontext()):
                rollouts = await self._play(job)
            job.pending.played.update(zip(job.siblings, rollouts, strict=True))

    async def _play(self, job: _EpisodeJob) -> Sequence[Rollout]:
        agent, task = job.pending.source.agent, job.pending.task
        contexts = [self._context(job.pending, sibling) for sibling in job.siblings]
        deadlines = {"timeout_s": self._worker.episode_timeout_s, "timeouts": self._worker.timeouts}
        if isinstance(agent, GroupAgent):
            return await play_group(agent, task, job.inference, contexts, **deadlines)
        return [await play(agent.rollout, task, job.inference, context, **deadlines) for context in contexts]

    def _context(self, pending: _PendingTask, sibling: int) -> EpisodeContext:
        index = pending.source.index
        words = f"{self._settings.seed}/{pending.task.key}/{sibling}"
        return EpisodeContext(
            ticket=Ticket(id=f"evaluation-{pending.task.key}", task_index=index, version=0, attempt=1),
            sibling=sibling,
            seed=int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1,
            gateway=self.gateway,
            policies=self.policies,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingTask:
    """A task whose episodes are being played. The greedy one follows the samples."""

    source: TaskSource
    task: Task
    played: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    """Rollouts by sibling; they end in any order."""

    def result(self, samples: int) -> TaskResult:
        return TaskResult(
            task=self.task, samples=[self.played[sibling] for sibling in range(samples)], greedy=self.played.get(samples)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpisodeJob:
    """Episodes that one player plays in one go."""

    pending: _PendingTask
    siblings: Sequence[int]
    inference: InferenceInterface
