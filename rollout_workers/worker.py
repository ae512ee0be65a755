"""From tickets to groups: reserve, roll out, commit, many groups at a time.

    buffer.reserve ──▶ GroupPlayer.play ──▶ buffer.commit      READY: the learner may take it
      ▲   (waits for slots:             └─▶ buffer.abandon     the ticket's task is rolled again
      │    the pacing)                      ▲
    weights_changed()              buffer.renew keeps the leases meanwhile; a lost one cuts its group short

consumes: tickets (buffer.reserve)    waits for:    a free slot, and weights as new as the live version
produces: groups  (buffer.commit)     unblocked by: learner release or drop; weights_changed(); a landing group; stop
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

import structlog

from async_rl.board.worker_reports import WorkerNote
from async_rl.config import HEARTBEAT_S, BatchConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import Gateway, InferenceInterface
from async_rl.replay_protocol import Drop, ReplayBuffer
from async_rl.types import Rollout, RolloutGroup, Ticket
from rollout_workers.counters import Counters
from rollout_workers.episodes.failure_log import FailureLog
from rollout_workers.episodes.group_rollout import GroupPlayer, Surroundings
from rollout_workers.episodes.leaked_processes import Strays
from rollout_workers.episodes.rewards import has_signal
from rollout_workers.episodes.task_ownership import END_S, tasks_have_owners
from rollout_workers.episodes.tasks import TaskMix
from rollout_workers.graders import open_graders
from rollout_workers.limits.concurrency import Concurrency, Load
from rollout_workers.limits.environment_limits import Gates

T = TypeVar("T")

Cut = Literal["lease_lost", "abandoned"]

LEFT_BEHIND = {"tasks behind": "tasks", "processes behind": "processes", "tasks that ignore being cancelled": "stubborn"}
"""What episodes leave, and how it is called in metrics."""

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
    playing: int
    """Of its episodes, those that have not ended; 1 while it is handed in."""
    cut_for: Cut | None = None
    _scope: asyncio.Timeout | None = None

    def cut(self, reason: Cut) -> None:
        """End the work of `until_cut`. What comes after that is finished."""
        if self.cut_for is None:
            self.cut_for = reason
            if self._scope is not None:
                _interrupt(self._scope)

    async def until_cut(self, work: Callable[[], Awaitable[T]]) -> T | Cut:
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                return self.cut_for if self.cut_for is not None else await work()
        except TimeoutError:
            if self.cut_for is None:
                raise
            return self.cut_for
        finally:
            self._scope = None


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
        gateway: Gateway | None = None,
        policies: Mapping[str, InferenceInterface] = MappingProxyType({}),
        load: Callable[[], Load] = Load,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`load` says how busy the engine is, for `groups_in_flight: auto`."""
        self.name = name
        self.counters = Counters()
        self._buffer = buffer
        self._inference = inference
        self._tasks = tasks
        self._batch = batch
        self._settings = settings
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._concurrency = Concurrency(at_most=settings.groups_at_most)
        self._failures = FailureLog(name)
        self._strays = Strays(longest_s=settings.episode_timeout_s + 2 * END_S, report=self._note_left_behind)
        self._gates = Gates(
            settings.breaker, self.counters, may_wait=lambda: max(1, self.limit // 4), played=lambda: tasks.played
        )
        self._player = GroupPlayer(
            worker=name,
            tasks=tasks,
            gates=self._gates,
            around=Surroundings(inference=inference, gateway=gateway, policies=policies),
            settings=settings,
            group_size=batch.group_size,
            seed=seed,
            counters=self.counters,
            failures=self._failures,
            strays=self._strays,
            heartbeat_s=heartbeat_s,
        )
        self._flights: dict[str, Flight] = {}
        """By ticket."""
        self._landed = 0
        self._changed = asyncio.Event()
        """An episode has ended, a group has landed, more may fly, or the worker shall stop."""
        self._reserving: asyncio.Timeout | None = None

    @property
    def groups_in_flight(self) -> int:
        return len(self._flights)

    @property
    def tickets(self) -> list[str]:
        """Those it works on."""
        return list(self._flights)

    def take_notes(self) -> list[WorkerNote]:
        """What went wrong since this was called last, for the console of the run."""
        return self._failures.take_notes()

    def leave_alone(self, environment: str, *, for_s: float) -> None:
        """It has held up a worker: none of its groups begins meanwhile, unless nothing else is left to be played."""
        self._gates.block(environment, for_s=for_s)

    @property
    def limit(self) -> int:
        """So many may fly."""
        fixed = self._settings.groups_in_flight
        return self._concurrency.limit if fixed == "auto" else fixed

    @property
    def _flying(self) -> int:
        """Episodes that are being played, in groups of them: so that a straggler keeps no whole group from beginning."""
        return ceil(sum(flight.playing for flight in self._flights.values()) / self._batch.group_size)

    def weights_changed(self) -> None:
        """Tell the worker that the inference serves another version: it asks for tickets again at once."""
        if self._reserving is not None:
            _interrupt(self._reserving)
            self._reserving = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then finish what flies within `drain_s` and hand back the rest."""
        with self._strays, tasks_have_owners(self._note_left_behind):
            async with open_graders(self._settings.grader_processes), self._tasks.open():
                await self._work(stop)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(self._wake_on(stop)), tasks.create_task(self._keep_leases())]
            while not stop.is_set():
                room = self.limit - self._flying
                if room > 0:
                    for ticket in await self._reserve(room):
                        await self._start(ticket, tasks, stop)
                else:
                    await self._change()
            await self._drain()
            for service in services:
                service.cancel()

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

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
            await self._change()
        flight = self._flights[ticket.id] = Flight(ticket, playing=self._batch.group_size)
        tasks.create_task(self._fly(flight), name=f"group {ticket.id}")

    async def _drain(self) -> None:
        self._gates.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self._flights:
                    await self._change()
        for flight in self._flights.values():
            flight.cut("abandoned")

    async def _keep_leases(self) -> None:
        """Service: renew every ticket in flight, and stop the work on those that are no longer ours."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._look_after()
            if not self._flights:
                continue
            for lost in await self._buffer.renew(self.name, list(self._flights)):
                if (flight := self._flights.get(lost)) is not None:  # it may have landed meanwhile
                    flight.cut("lease_lost")

    def _look_after(self) -> None:
        self._strays.sweep(asyncio.get_running_loop().time())
        before = self.limit
        self._concurrency.observe(flying=self._flying, landed=self._landed, load=self._load())
        if self.limit > before:
            self._changed.set()

    async def _fly(self, flight: Flight) -> None:
        """One group, from its ticket to its end."""
        try:
            ended = await flight.until_cut(lambda: self._roll_out(flight))
            if isinstance(ended, RolloutGroup):
                await self._hand_in(ended)
            else:
                await self._give_up(flight.ticket.id, ended)
        finally:
            del self._flights[flight.ticket.id]
            self._changed.set()

    async def _roll_out(self, flight: Flight) -> RolloutGroup | Drop:
        def episode_ended() -> None:
            flight.playing = max(1, flight.playing - 1)
            self._changed.set()

        if not self._tasks.knows(flight.ticket.mix):
            self._tasks.follow(await self._buffer.mix())
        return await self._player.play(flight.ticket, episode_ended)

    async def _hand_in(self, group: RolloutGroup) -> None:
        """Commit the group. Repeating a commit after a lost reply is the buffer client's work, and harmless."""
        result = await self._buffer.commit(self.name, group, keep=self._is_worth_keeping(group.rollouts))
        self._landed += 1
        self.counters.groups[result] += 1
        self.counters.landed[group.task.environment] += result == "stored"
        if result == "quarantined":
            log.warning("group refused by the buffer", group=group.id, task=group.task.key)

    def _is_worth_keeping(self, rollouts: Sequence[Rollout]) -> bool:
        compares_siblings = self._batch.drop_no_signal and self._batch.group_size > 1
        return has_signal(rollouts) if compares_siblings else True

    async def _give_up(self, ticket: str, reason: Drop) -> None:
        self.counters.groups[reason] += 1
        if reason != "lease_lost":  # then there is nothing left to hand back
            await self._buffer.abandon(self.name, ticket, reason)

    def _note_left_behind(self, environment: str, what: str, names: list[str]) -> None:
        self.counters.left_behind[LEFT_BEHIND.get(what, what)] += 1
        self._failures.note_left_behind(environment, what, names)


def _interrupt(waiting: asyncio.Timeout) -> None:
    """End a wait now: it raises TimeoutError where it was entered."""
    waiting.reschedule(asyncio.get_running_loop().time())
