"""One group, from its ticket to its scored siblings. What breaks is counted, logged, and held against its environment.

ticket ─▶ seat (whose task is it?) ─▶ gate (may it play now?) ─▶ pose ─▶ ┌ sibling 0 ┐ ─▶ refill the failed ─▶ RolloutGroup
                └─────────────── else: why the ticket is handed back ────┴ ...       ┘
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import Agent, EpisodeContext, Gateway, GroupAgent, InferenceInterface
from async_rl.replay_protocol import Drop
from async_rl.types import Failure, Rollout, RolloutGroup, Task, Ticket
from rollout_workers.counters import Counters
from rollout_workers.episodes.episode import FailureBudget, play, play_group, pose
from rollout_workers.episodes.failure_log import FailureLog
from rollout_workers.episodes.leaked_processes import Strays
from rollout_workers.episodes.tasks import EnvironmentDetached, EnvironmentUnavailable, Seat, TaskMix
from rollout_workers.episodes.validation import trainable
from rollout_workers.limits.environment_limits import Gates, TurnedAway, Visit

HANDED_ON = 8
"""A task that nobody can play is handed on so often; after that it counts as failed, and comes to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What episodes find beside their task."""

    inference: InferenceInterface
    gateway: Gateway | None
    policies: Mapping[str, InferenceInterface]


class GroupPlayer:
    def __init__(
        self,
        *,
        worker: str,
        tasks: TaskMix,
        gates: Gates,
        around: Surroundings,
        settings: WorkerConfig,
        group_size: int,
        seed: int,
        counters: Counters,
        failures: FailureLog,
        strays: Strays,
        heartbeat_s: float,
    ) -> None:
        self._counters = counters
        self._worker = worker
        self._tasks = tasks
        self._gates = gates
        self._around = around
        self._settings = settings
        self._group_size = group_size
        self._seed = seed
        self._failures = failures
        self._strays = strays
        self._heartbeat_s = heartbeat_s
        self._budget = FailureBudget(settings.failure_budget)

    async def play(self, ticket: Ticket, episode_ended: Callable[[], None]) -> RolloutGroup | Drop:
        """The ticket's group, or why there is none; siblings that are played one by one also end one by one. Raises
        FailureBudgetSpent.
        """
        try:
            async with (
                self._tasks.seat(ticket.task_index, ticket.mix, is_rolled_again=ticket.attempt > 1) as seat,
                self._gates.enter(seat.environment) as visit,
            ):
                self._strays.spare_those_of(seat.agent)
                group = await self._play_in(seat, visit, ticket, episode_ended)
        except EnvironmentUnavailable as missing:
            self._counters.unavailable[missing.environment] += 1
            await asyncio.sleep(self._heartbeat_s)  # for another worker: handed back at once, it would be ours again at once
        except EnvironmentDetached:
            return "detached"
        except TurnedAway:
            pass
        else:
            return group if group is not None else "failed"
        return "abandoned" if ticket.attempt <= HANDED_ON else "failed"

    async def _play_in(
        self, seat: Seat, visit: Visit, ticket: Ticket, episode_ended: Callable[[], None]
    ) -> RolloutGroup | None:
        task = await pose(seat, self._settings.timeouts, visit.posing)
        if isinstance(task, Failure):
            self._counters.add_unposed_task(task)
            self._note_failure(task, environment=seat.environment.label, task=f"index {seat.index}")
            visit.failed(task)
            return None
        rollouts = await self._siblings(seat.agent, task, ticket, episode_ended)
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        if len(failures) == len(rollouts):
            visit.failed(failures[-1])
            return None
        visit.succeeded()
        return RolloutGroup(id=ticket.id, task=task, rollouts=tuple(rollouts), worker=self._worker)

    async def _siblings(self, agent: Agent, task: Task, ticket: Ticket, episode_ended: Callable[[], None]) -> Sequence[Rollout]:
        if isinstance(agent, GroupAgent):
            contexts = [self._context(ticket, sibling) for sibling in range(self._group_size)]
            rollouts = await play_group(
                agent,
                task,
                self._around.inference,
                contexts,
                timeout_s=self._settings.episode_timeout_s,
                timeouts=self._settings.timeouts,
            )
            return [self._noted(task, trainable(rollout)) for rollout in rollouts]
        refills = iter(range(self._settings.refills))

        async def sibling(number: int) -> Rollout:
            rollout = await self._sibling(agent, task, ticket, number, refills)
            episode_ended()
            return rollout

        async with asyncio.TaskGroup() as siblings:
            playing = [siblings.create_task(sibling(number)) for number in range(self._group_size)]
        return [each.result() for each in playing]

    async def _sibling(self, agent: Agent, task: Task, ticket: Ticket, sibling: int, refills: Iterator[int]) -> Rollout:
        """Played again when it failed, as long as the group's refills last."""
        time = 0
        while True:
            context = self._context(ticket, sibling, time)
            played = await play(
                agent,
                task,
                self._around.inference,
                context,
                timeout_s=self._settings.episode_timeout_s,
                timeouts=self._settings.timeouts,
            )
            rollout = self._noted(task, trainable(played))
            if rollout.failure is None or next(refills, None) is None:
                return rollout
            self._counters.refills += 1
            time += 1

    def _context(self, ticket: Ticket, sibling: int, time: int = 0) -> EpisodeContext:
        return EpisodeContext(
            ticket=ticket,
            sibling=sibling,
            seed=_episode_seed(self._seed, ticket, sibling, time),
            gateway=self._around.gateway,
            policies=self._around.policies,
        )

    def _noted(self, task: Task, rollout: Rollout) -> Rollout:
        self._counters.add_rollout(task, rollout)
        if rollout.failure is None:
            self._budget.succeeded()
        else:
            self._note_failure(rollout.failure, environment=task.environment, task=task.key)
        return rollout

    def _note_failure(self, failure: Failure, *, environment: str, task: str) -> None:
        self._failures.note(failure, environment=environment, task=task)
        self._budget.spend(failure)


def _episode_seed(run_seed: int, ticket: Ticket, sibling: int, time: int) -> int:
    """63 bits from everything that tells an episode from others, and from nothing else."""
    words = f"{run_seed}/{ticket.task_index}/{ticket.attempt}/{sibling}" + (f"/{time}" if time else "")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1
