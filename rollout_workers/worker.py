"""From tickets to groups: reserve, roll out, commit, many groups at a time.

    buffer.reserve ──▶ pose the task ──▶ ┌ play sibling 0 ┐
      ▲   (waits for slots:              │ play sibling 1 │ ──▶ buffer.commit      READY: the learner may take it
      │    the pacing)                   └ ...            ┘ └─▶ buffer.abandon     the ticket's task is rolled again
      │                                     ▲
    weights_changed()              buffer.renew keeps the leases meanwhile; a lost one cuts its group short

consumes: tickets (buffer.reserve)    waits for:    a free slot, and weights as new as the live version
produces: groups  (buffer.commit)     unblocked by: learner release or drop; weights_changed(); a landing group; stop
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from async_rl.config import HEARTBEAT_S, BatchConfig
from async_rl.protocols import Agent, Drop, EpisodeContext, InferenceInterface, ReplayBuffer
from async_rl.rollout_config import WorkerConfig
from async_rl.types import Failure, Rollout, RolloutGroup, Status, Task, Ticket
from rollout_workers.counters import Counters
from rollout_workers.episode import FailureBudget, play, pose
from rollout_workers.rewards import has_signal
from rollout_workers.tasks import TaskMix

log = structlog.get_logger()


class VersionedInference(InferenceInterface, Protocol):
    """Inference whose weights are numbered."""

    @property
    def version(self) -> int:
        """What new generations are sampled with; -1 while it holds no weights."""
        ...


@dataclass(slots=True)
class Flight:
    """A ticket that is being worked on."""

    ticket: Ticket
    playing: asyncio.Timeout | None = None
    """Open while episodes run; a flight can be cut short only then."""
    cut_for: Literal["lease_lost", "abandoned"] | None = None

    def cut(self, reason: Literal["lease_lost", "abandoned"]) -> None:
        if self.playing is not None and self.cut_for is None:
            self.cut_for = reason
            _interrupt(self.playing)


class Worker:
    """Rolls out groups until it is told to stop."""

    def __init__(
        self,
        *,
        name: str,
        buffer: ReplayBuffer,
        inference: VersionedInference,
        tasks: TaskMix,
        batch: BatchConfig,
        settings: WorkerConfig,
        seed: int,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.name = name
        self.counters = Counters()
        self._buffer = buffer
        self._inference = inference
        self._tasks = tasks
        self._batch = batch
        self._settings = settings
        self._seed = seed
        self._heartbeat_s = heartbeat_s
        self._budget = FailureBudget(settings.failure_budget)
        self._flights: dict[str, Flight] = {}
        """By ticket."""
        self._flying: set[asyncio.Task[None]] = set()
        self._reserving: asyncio.Timeout | None = None

    @property
    def groups_in_flight(self) -> int:
        return len(self._flights)

    def weights_changed(self) -> None:
        """Tell the worker that the inference serves another version: it asks for tickets again at once."""
        if self._reserving is not None:
            _interrupt(self._reserving)
            self._reserving = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then finish what flies within `drain_s` and hand back the rest."""
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(stop.wait(), name="stop")
            leases = tasks.create_task(self._keep_leases(), name="leases")
            while not stop.is_set():
                room = self._settings.groups_in_flight - len(self._flights)
                for ticket in await self._reserve(room) if room else []:
                    await self._start(ticket, tasks, stop)
                if len(self._flights) >= self._settings.groups_in_flight:
                    await asyncio.wait([stopping, *self._flying], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            leases.cancel()

    async def _reserve(self, count: int) -> list[Ticket]:
        """Wait for tickets, as long as the version they are asked for is the one that is served.

        A change of weights cuts the wait short. It follows the publication of those weights, and since then the
        older version is refused: so no ticket is lost in the cut.
        """
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._reserving = waiting
                version = self._inference.version
                return await self._buffer.reserve(self.name, version=version, count=count, wait_s=self._heartbeat_s)
        except TimeoutError:
            if not waiting.expired():
                raise
            return []
        finally:
            self._reserving = None

    async def _start(self, ticket: Ticket, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        if stop.is_set():
            await self._give_up(ticket.id, "abandoned")
            return
        while (older := self._flights.get(ticket.id)) is not None:  # a server that was set back gives a number again
            older.cut("lease_lost")
            await asyncio.wait(self._flying, return_when=asyncio.FIRST_COMPLETED)
        flight = self._flights[ticket.id] = Flight(ticket)
        flying = tasks.create_task(self._fly(flight), name=f"group {ticket.id}")
        self._flying.add(flying)
        flying.add_done_callback(self._flying.discard)

    async def _drain(self) -> None:
        if self._flying:
            await asyncio.wait(self._flying, timeout=self._settings.drain_s)
        for flight in list(self._flights.values()):
            flight.cut("abandoned")

    async def _keep_leases(self) -> None:
        """Service: renew every ticket in flight, and stop the work on those that are no longer ours."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self._flights:
                continue
            for lost in await self._buffer.renew(self.name, list(self._flights)):
                if (flight := self._flights.get(lost)) is not None:  # it may have landed meanwhile
                    flight.cut("lease_lost")

    async def _fly(self, flight: Flight) -> None:
        """One group, from its ticket to its end."""
        ticket = flight.ticket
        try:
            posed = pose(self._tasks, ticket.task_index)
            if isinstance(posed, Failure):
                self.counters.add_unposed_task(posed)
                self._budget.spend(posed)
                await self._give_up(ticket.id, "failed")
                return
            agent, task = posed
            rollouts = await self._play_siblings(flight, agent, task)
            if rollouts is not None:
                await self._hand_in(RolloutGroup(id=ticket.id, task=task, rollouts=rollouts, worker=self.name))
            elif flight.cut_for is not None:
                await self._give_up(ticket.id, flight.cut_for)
        finally:
            del self._flights[ticket.id]

    async def _play_siblings(self, flight: Flight, agent: Agent, task: Task) -> tuple[Rollout, ...] | None:
        """All siblings at once; None when the flight was cut short."""
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                flight.playing = waiting
                async with asyncio.TaskGroup() as siblings:
                    episodes = [
                        siblings.create_task(self._play(flight.ticket, sibling, agent, task))
                        for sibling in range(self._batch.group_size)
                    ]
            return tuple(episode.result() for episode in episodes)
        except TimeoutError:
            return None
        finally:
            flight.playing = None

    async def _play(self, ticket: Ticket, sibling: int, agent: Agent, task: Task) -> Rollout:
        context = EpisodeContext(ticket=ticket, sibling=sibling, seed=_episode_seed(self._seed, ticket, sibling))
        rollout = await play(agent, task, self._inference, context, timeout_s=self._settings.episode_timeout_s)
        self.counters.add_rollout(task, rollout)
        if rollout.failure is None:
            self._budget.succeeded()
        else:
            log.warning("episode failed", task=task.key, sibling=sibling, **_described(rollout.failure))
            self._budget.spend(rollout.failure)
        return rollout

    async def _hand_in(self, group: RolloutGroup) -> None:
        """Commit the group. Repeating a commit after a lost reply is the buffer client's work, and harmless."""
        if all(rollout.status is Status.FAILED for rollout in group.rollouts):
            await self._give_up(group.id, "failed")
            return
        result = await self._buffer.commit(self.name, group, keep=self._is_worth_keeping(group.rollouts))
        self.counters.groups[result] += 1
        if result == "quarantined":
            log.warning("group refused by the buffer", group=group.id, task=group.task.key)

    def _is_worth_keeping(self, rollouts: Sequence[Rollout]) -> bool:
        compares_siblings = self._batch.drop_no_signal and self._batch.group_size > 1
        return has_signal(rollouts) if compares_siblings else True

    async def _give_up(self, ticket: str, reason: Drop) -> None:
        self.counters.groups[reason] += 1
        if reason != "lease_lost":  # then there is nothing left to hand back
            await self._buffer.abandon(self.name, ticket, reason)


def _interrupt(waiting: asyncio.Timeout) -> None:
    """End a wait now: it raises TimeoutError where it was entered."""
    waiting.reschedule(asyncio.get_running_loop().time())


def _described(failure: Failure) -> dict[str, str]:
    return {"boundary": failure.boundary, "kind": failure.kind, "message": failure.message}


def _episode_seed(run_seed: int, ticket: Ticket, sibling: int) -> int:
    """63 bits from everything that tells an episode from others, and from nothing else."""
    words = f"{run_seed}/{ticket.task_index}/{ticket.attempt}/{sibling}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1
