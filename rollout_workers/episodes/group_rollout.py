"""Roll out one group: from its ticket to its scored siblings. Failures are counted, logged and reported to the breaker.

ticket ─▶ task source (environment, index) ─▶ limits (may it start?) ─▶ task ─▶ siblings ─▶ refill failed ones ─▶ RolloutGroup
                     └──────────────────────────────┴───── else: the reason why the ticket is handed back (a `Drop`)
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.protocols import Agent, EpisodeContext, GroupAgent
from async_rl.replay_protocol import Drop
from async_rl.types import Failure, Rollout, RolloutGroup, Task, Ticket
from rollout_workers.counters import Counters
from rollout_workers.episodes.episode import FailureBudget, play, play_group, pose_task
from rollout_workers.episodes.failure_log import FailureLog
from rollout_workers.episodes.group_timeline import as_sibling, current_clock
from rollout_workers.episodes.leaked_processes import LeakedProcesses
from rollout_workers.episodes.task_mix import EnvironmentDetached, EnvironmentUnavailable, TaskSource
from rollout_workers.episodes.validation import trainable
from rollout_workers.limits.environment_limits import EnvironmentLimits, GroupAttempt, NotAdmitted
from rollout_workers.worker_parts import WorkerParts

MAX_HAND_BACKS = 8
"""Times a task is returned for another worker before it counts as failed."""


@dataclass
class GroupRunner:
    parts: WorkerParts
    limits: EnvironmentLimits
    counters: Counters
    failures: FailureLog
    leaked_processes: LeakedProcesses

    def __post_init__(self) -> None:
        settings = self.parts.settings
        self._deadlines: Any = {"timeout_s": settings.episode_timeout_s, "timeouts": settings.timeouts}
        self._budget = FailureBudget(settings.failure_budget)

    async def run(self, ticket: Ticket, episode_ended: Callable[[Rollout], None]) -> RolloutGroup | Drop:
        """Return the ticket's group, or the reason why there is none. Raises FailureBudgetSpent.

        `episode_ended` is called after each episode.
        """
        try:
            async with (
                self.parts.tasks.source(ticket.task_index, ticket.mix, is_rolled_again=ticket.attempt > 1) as source,
                self.limits.admit(source.environment) as attempt,
            ):
                self.leaked_processes.spare_children_of(source.agent)
                group = await self._pose_and_play(source, attempt, ticket, episode_ended)
        except EnvironmentUnavailable as missing:
            self.counters.unavailable[missing.environment] += 1
            # Leave it to another worker: handed back at once, it would be reserved here again.
            await asyncio.sleep(self.parts.heartbeat_s)
        except EnvironmentDetached:
            return "detached"
        except NotAdmitted:
            pass
        else:
            return group if group is not None else "failed"
        return "abandoned" if ticket.attempt <= MAX_HAND_BACKS else "failed"

    async def _pose_and_play(
        self, source: TaskSource, attempt: GroupAttempt, ticket: Ticket, episode_ended: Callable[[Rollout], None]
    ) -> RolloutGroup | None:
        task = await pose_task(source, self.parts.settings.timeouts, attempt.task_lock)
        if isinstance(task, Failure):
            self.counters.add_unposed_task(task)
            self._note_failure(task, environment=source.environment.label, task=f"index {source.index}")
            attempt.failed(task)
            return None
        if (clock := current_clock()) is not None:
            clock.timeline.task = task
        rollouts = await self._siblings(source.agent, task, ticket, episode_ended)
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        if len(failures) == len(rollouts):
            attempt.failed(failures[-1])
            return None
        attempt.has_succeeded = True
        times = clock.timeline.times() if clock is not None else None
        return RolloutGroup(id=ticket.id, task=task, rollouts=tuple(rollouts), worker=self.parts.name, times=times)

    async def _siblings(
        self, agent: Agent, task: Task, ticket: Ticket, episode_ended: Callable[[Rollout], None]
    ) -> Sequence[Rollout]:
        if isinstance(agent, GroupAgent):
            contexts = [self._context(ticket, sibling) for sibling in range(self.parts.batch.group_size)]
            rollouts = await play_group(agent, task, self.parts.inference, contexts, **self._deadlines)
            recorded = [self._recorded(task, trainable(rollout)) for rollout in rollouts]
            for rollout in recorded:
                episode_ended(rollout)
            return recorded
        refills = iter(range(self.parts.settings.refills))

        async def sibling(number: int) -> Rollout:
            rollout = await self._sibling(agent, task, ticket, number, refills)
            episode_ended(rollout)
            return rollout

        async with asyncio.TaskGroup() as siblings:
            playing = [siblings.create_task(sibling(number)) for number in range(self.parts.batch.group_size)]
        return [each.result() for each in playing]

    async def _sibling(self, agent: Agent, task: Task, ticket: Ticket, sibling: int, refills: Iterator[int]) -> Rollout:
        """Play one sibling, and again while it fails and the group has refills left."""
        time = 0
        while True:
            context = self._context(ticket, sibling, time)
            with as_sibling(sibling):
                played = await play(agent.rollout, task, self.parts.inference, context, **self._deadlines)
            rollout = self._recorded(task, trainable(played))
            if rollout.failure is None or next(refills, None) is None:
                return rollout
            self.counters.refills += 1
            time += 1

    def _context(self, ticket: Ticket, sibling: int, time: int = 0) -> EpisodeContext:
        return EpisodeContext(
            ticket=ticket,
            sibling=sibling,
            seed=_episode_seed(self.parts.seed, ticket, sibling, time),
            gateway=self.parts.gateway,
            policies=self.parts.policies,
        )

    def _recorded(self, task: Task, rollout: Rollout) -> Rollout:
        self.counters.add_rollout(task, rollout)
        if rollout.failure is None:
            self._budget.succeeded()
        else:
            self._note_failure(rollout.failure, environment=task.environment, task=task.key)
        return rollout

    def _note_failure(self, failure: Failure, *, environment: str, task: str) -> None:
        self.failures.note(failure, environment=environment, task=task)
        self._budget.spend(failure)


def _episode_seed(run_seed: int, ticket: Ticket, sibling: int, time: int) -> int:
    """63 bits that depend on what distinguishes an episode from others, and on nothing else."""
    words = f"{run_seed}/{ticket.task_index}/{ticket.attempt}/{sibling}" + (f"/{time}" if time else "")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1
