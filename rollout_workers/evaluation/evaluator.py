"""Plays a fixed set of tasks with one inference, and keeps what came of them.

environments x tasks x (samples + a greedy one) ──▶ jobs ──▶ some players ──▶ TaskResults, in order
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import structlog

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, FiniteAgent, GenerationArgs, GroupAgent, InferenceInterface
from async_rl.types import Failure, Rollout, Task, Ticket
from rollout_workers.episodes.episode import play, play_group, pose
from rollout_workers.episodes.group_rollout import Surroundings
from rollout_workers.episodes.tasks import Seat
from rollout_workers.inference.readable import Readable
from rollout_workers.registry import build_agent

log = structlog.get_logger()

GREEDY = GenerationArgs(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskResult:
    """All that was played of one task."""

    task: Task
    samples: Sequence[Rollout]
    greedy: Rollout | None = None


@asynccontextmanager
async def open_environments(config: Config) -> AsyncGenerator[list[Seat]]:
    """The environments to evaluate, each at its first task, made with the seed of the evaluation and held open."""
    chosen = config.evaluation.environments
    async with AsyncExitStack() as held:
        seats: list[Seat] = []
        for section in config.environments:
            if not chosen or section.label in chosen:
                agent = build_agent(section, config.evaluation.seed)
                if isinstance(agent, AbstractAsyncContextManager):
                    await held.enter_async_context(agent)
                seats.append(Seat(environment=section, agent=agent, index=0))
        yield seats


class Evaluator:
    def __init__(self, seats: Sequence[Seat], config: Config, around: Surroundings) -> None:
        self._seats = seats
        self._settings = config.evaluation
        self._worker = config.worker
        self._around = around
        self._told: set[str] = set()
        """Environments with fewer tasks than were asked for, once that was said."""
        self._places = {
            seat.environment.label: asyncio.Semaphore(most)
            for seat in seats
            if (most := seat.environment.max_in_flight) is not None
        }

    async def evaluate(self) -> list[TaskResult]:
        """A broken episode is part of the result. Raises ConfigError when an environment cannot pose its tasks."""
        drafts = [draft for seat in self._seats for draft in await self._drafts(seat)]
        sampled, greedy = Readable(self._around.inference), Readable(self._around.inference, always=GREEDY)
        jobs = (job for draft in drafts for job in self._jobs(draft, sampled, greedy))
        async with asyncio.TaskGroup() as players:
            for _ in range(self._settings.episodes_in_flight):
                players.create_task(self._play_all(jobs))
        return [draft.result(self._settings.samples) for draft in drafts]

    async def _drafts(self, seat: Seat) -> Iterable[_Draft]:
        """As many different tasks as are asked for, or all that there are: a row that comes again says nothing new."""
        label = seat.environment.label
        asked = self._settings.tasks_of(label)
        num_tasks = seat.agent.num_tasks if isinstance(seat.agent, FiniteAgent) else None
        if asked == "all":
            if num_tasks is None:
                raise ConfigError(f"evaluation.tasks is `all`, but the tasks of environment {label!r} never end: give a number")
            asked = num_tasks
        found: dict[tuple[str, str], _Draft] = {}
        for index in range(num_tasks if num_tasks is not None else asked):
            if len(found) == asked:
                break
            draft = await self._draft(Seat(environment=seat.environment, agent=seat.agent, index=index))
            found.setdefault((draft.task.environment, draft.task.key), draft)
        if len(found) < asked and label not in self._told:
            self._told.add(label)
            log.warning(f"environment {label!r} has {len(found)} different tasks of the {asked} asked for: all are evaluated")
        return found.values()

    async def _draft(self, seat: Seat) -> _Draft:
        task = await pose(seat, self._worker.timeouts)
        if isinstance(task, Failure):
            raise ConfigError(
                f"environment {seat.environment.label!r} cannot pose task {seat.index}: {task.kind}: {task.message}"
            )
        return _Draft(seat=seat, task=task)

    def _jobs(self, draft: _Draft, sampled: InferenceInterface, greedy: InferenceInterface) -> Iterator[_Job]:
        """Episodes one by one, or a group at once where siblings depend on each other. These have no greedy pass: the same
        answer from all of them compares nothing.
        """
        samples = range(self._settings.samples)
        if isinstance(draft.seat.agent, GroupAgent):
            yield _Job(draft=draft, siblings=samples, inference=sampled)
            return
        yield from (_Job(draft=draft, siblings=[sibling], inference=sampled) for sibling in samples)
        if self._settings.greedy:
            yield _Job(draft=draft, siblings=[len(samples)], inference=greedy)

    async def _play_all(self, jobs: Iterator[_Job]) -> None:
        """One of several players of the same jobs."""
        for job in jobs:
            async with self._places.get(job.draft.seat.environment.label, nullcontext()):
                rollouts = await self._play(job)
            job.draft.played.update(zip(job.siblings, rollouts, strict=True))

    async def _play(self, job: _Job) -> Sequence[Rollout]:
        agent, task = job.draft.seat.agent, job.draft.task
        contexts = [self._context(job.draft, sibling) for sibling in job.siblings]
        deadlines = {"timeout_s": self._worker.episode_timeout_s, "timeouts": self._worker.timeouts}
        if isinstance(agent, GroupAgent):
            return await play_group(agent, task, job.inference, contexts, **deadlines)
        return [await play(agent, task, job.inference, context, **deadlines) for context in contexts]

    def _context(self, draft: _Draft, sibling: int) -> EpisodeContext:
        index = draft.seat.index
        words = f"{self._settings.seed}/{draft.task.key}/{sibling}"
        return EpisodeContext(
            ticket=Ticket(id=f"evaluation-{draft.task.key}", task_index=index, version=0, attempt=1),
            sibling=sibling,
            seed=int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1,
            gateway=self._around.gateway,
            policies=self._around.policies,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A task whose episodes are being played. The greedy one comes behind the samples."""

    seat: Seat
    task: Task
    played: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    """By sibling: they end in any order."""

    def result(self, samples: int) -> TaskResult:
        return TaskResult(
            task=self.task, samples=[self.played[sibling] for sibling in range(samples)], greedy=self.played.get(samples)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Episodes that one player plays."""

    draft: _Draft
    siblings: Sequence[int]
    inference: InferenceInterface
