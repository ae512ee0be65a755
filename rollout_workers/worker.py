"""The rollout worker: reserve tickets, roll out their groups, commit them; many groups at a time.

    buffer.reserve ──▶ GroupRunner.run ───▶ buffer.commit      the group is ready for the learner, or dropped, or quarantined
      ▲  (waits for a free slot,        └─▶ buffer.abandon     the task is rolled out again, unless it failed max_attempts times
      │   which paces the workers)
    weights_changed()    buffer.renew keeps the leases meanwhile; a group whose lease is lost is cancelled

consumes: tickets (buffer.reserve)    waits for:    a free slot, and weights as new as the live version
produces: groups  (buffer.commit)     unblocked by: release; drop; a raised limit; weights_changed(); a finished group; stop
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, TypeVar

import structlog

from async_rl.replay_protocol import Drop
from async_rl.types import Rollout, RolloutGroup, Ticket
from rollout_workers.counters import Counters
from rollout_workers.episodes.failure_log import FailureLog
from rollout_workers.episodes.group_rollout import GroupRunner
from rollout_workers.episodes.group_timeline import GroupTimeline
from rollout_workers.episodes.leaked_processes import LeakedProcesses
from rollout_workers.episodes.leaked_tasks import END_S, track_episode_tasks
from rollout_workers.episodes.rewards import has_signal
from rollout_workers.episodes.worker_records import WorkerRecords
from rollout_workers.graders import open_graders
from rollout_workers.limits.concurrency import ConcurrencyLimit
from rollout_workers.limits.environment_limits import EnvironmentLimits
from rollout_workers.progress_lines import ProgressLines
from rollout_workers.worker_parts import WorkerParts

T = TypeVar("T")

Cut = Literal["lease_lost", "abandoned"]

LEAK_METRICS = {"leaked tasks": "tasks", "leaked processes": "processes", "tasks that ignore cancellation": "stubborn"}
"""Kinds of leaks, and their names in the metric `rollout/left_behind/{what}`."""

WAITED_HEARTBEATS = 10
"""A wait for tickets ends after so many: each begins with a subscription, and an idle fleet should not keep Redis busy."""

log = structlog.get_logger()


@dataclass(slots=True)
class GroupInFlight:
    """A ticket whose group is being rolled out or committed."""

    ticket: Ticket
    num_playing: int
    """Number of its episodes that have not ended; 1 while the group is being committed."""
    tokens: int = 0
    """Tokens of its ended episodes, prompts included."""
    timeline: GroupTimeline = field(default_factory=GroupTimeline)
    cut_for: Cut | None = None
    _scope: asyncio.Timeout | None = None

    def cut(self, reason: Cut) -> None:
        """Cancel the work inside `until_cut`. Work that comes after it is not interrupted."""
        if self.cut_for is None:
            self.cut_for = reason
            if self._scope is not None:
                _expire(self._scope)

    async def until_cut(self, work: Callable[[], Awaitable[T]]) -> T | Cut:
        """Return the result of `work`, or the reason why `cut` ended it."""
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
    """Roll out groups until told to stop."""

    def __init__(self, parts: WorkerParts) -> None:
        self.counters = Counters()
        self._progress = ProgressLines(self.counters)
        self._parts = parts
        self._settings = settings = parts.settings
        self._concurrency = ConcurrencyLimit(at_most=settings.groups_at_most)
        self.failures = FailureLog(parts.name)
        self.records = WorkerRecords(parts.name, keeps_dropped=parts.keeps_dropped)
        self._leaked_processes = LeakedProcesses(longest_s=settings.episode_timeout_s + 2 * END_S, report=self._note_leak)
        self.environment_limits = EnvironmentLimits(
            settings.breaker, self.counters, may_wait=lambda: max(1, self.limit // 4), played=lambda: parts.tasks.played
        )
        self._runner = GroupRunner(parts, self.environment_limits, self.counters, self.failures, self._leaked_processes)
        self._in_flight: dict[str, GroupInFlight] = {}
        """By ticket id."""
        self._num_finished = 0
        self._changed = asyncio.Event()
        """Set when an episode or a group ends, when the limit rises, and when the worker is to stop."""
        self._reserving: asyncio.Timeout | None = None

    @property
    def tickets(self) -> list[str]:
        """Ids of the tickets it holds."""
        return list(self._in_flight)

    @property
    def limit(self) -> int:
        """How many groups may run at once."""
        fixed = self._settings.groups_in_flight
        return self._concurrency.limit if fixed == "auto" else fixed

    @property
    def _groups_playing(self) -> int:
        """Running episodes divided by the group size: one slow episode does not keep a whole group from starting."""
        return ceil(sum(group.num_playing for group in self._in_flight.values()) / self._parts.batch.group_size)

    def weights_changed(self) -> None:
        """Ask for tickets again at once: the inference serves another version."""
        self._progress.weights_changed(self._parts.inference.version)
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        """End a wait for tickets."""
        if self._reserving is not None:
            _expire(self._reserving)
            self._reserving = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then give running groups `drain_s` seconds to finish, and hand back the rest."""
        with self._leaked_processes, track_episode_tasks(self._note_leak):
            async with open_graders(self._settings.grader_processes), self._parts.tasks.open():
                await self._work(stop)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(self._wake_on(stop)), tasks.create_task(self._renew_leases())]
            while not stop.is_set():
                room = self.limit - self._groups_playing
                if room > 0:
                    for ticket in await self._reserve(room):
                        await self._start(ticket, tasks, stop)
                else:
                    await self._wait_for_change()
            await self._drain()
            for service in services:
                service.cancel()

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()
        self._stop_waiting()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _reserve(self, count: int) -> list[Ticket]:
        """Wait for tickets of the version that is being served.

        A change of weights ends the wait, and so does `stop`. Tickets of a reply that was not read then are not lost: the next
        call returns them.
        """
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._reserving = waiting
                version = self._parts.inference.version
                return await self._parts.buffer.reserve(
                    self._parts.name, version=version, count=count, wait_s=WAITED_HEARTBEATS * self._parts.heartbeat_s
                )
        except TimeoutError:
            if not waiting.expired():
                raise
            return []
        finally:
            self._reserving = None

    async def _unread_tickets(self) -> list[Ticket]:
        """Return the tickets that a reservation got whose wait was ended before its reply came."""
        return await self._parts.buffer.reserve(self._parts.name, version=self._parts.inference.version, count=0, wait_s=0.0)

    async def _start(self, ticket: Ticket, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        if stop.is_set():
            await self._hand_back(GroupInFlight(ticket, num_playing=0), "abandoned")
            return
        # A server restored from an older state may issue a ticket id again; the older group with that id is cut.
        while (older := self._in_flight.get(ticket.id)) is not None:
            older.cut("lease_lost")
            await self._wait_for_change()
        group = self._in_flight[ticket.id] = GroupInFlight(ticket, num_playing=self._parts.batch.group_size)
        tasks.create_task(self._work_on(group), name=f"group {ticket.id}")

    async def _drain(self) -> None:
        self.environment_limits.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                for ticket in await self._unread_tickets():
                    await self._hand_back(GroupInFlight(ticket, num_playing=0), "abandoned")
                while self._in_flight:
                    await self._wait_for_change()
        for group in self._in_flight.values():
            group.cut("abandoned")

    async def _renew_leases(self) -> None:
        """Service: renew every ticket in flight, and cancel the groups whose lease is lost."""
        while True:
            await asyncio.sleep(self._parts.heartbeat_s)
            self._check_up()
            if not self._in_flight:
                continue
            for lost in await self._parts.buffer.renew(self._parts.name, list(self._in_flight)):
                if (group := self._in_flight.get(lost)) is not None:  # it may have finished meanwhile
                    group.cut("lease_lost")

    def _check_up(self) -> None:
        self._leaked_processes.sweep(asyncio.get_running_loop().time())
        before = self.limit
        self._concurrency.observe(playing=self._groups_playing, finished=self._num_finished, load=self._parts.load())
        if self.limit > before:
            self._changed.set()

    async def _work_on(self, group: GroupInFlight) -> None:
        """Roll out one group and commit it, or hand its ticket back."""
        try:
            ended = await group.until_cut(lambda: self._roll_out(group))
            if isinstance(ended, RolloutGroup):
                await self._commit(group.ticket, ended)
            else:
                await self._hand_back(group, ended)
        finally:
            del self._in_flight[group.ticket.id]
            self._changed.set()

    async def _roll_out(self, group: GroupInFlight) -> RolloutGroup | Drop:
        def episode_ended(rollout: Rollout) -> None:
            group.tokens += rollout.num_tokens
            group.timeline.rollouts.append(rollout)
            group.num_playing = max(1, group.num_playing - 1)
            self._changed.set()

        if not self._parts.tasks.knows(group.ticket.mix):  # the ticket names a mix newer than this worker's
            self._parts.tasks.follow(await self._parts.buffer.mix())
        with group.timeline.measured():
            return await self._runner.run(group.ticket, episode_ended)

    async def _commit(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Commit the group. The buffer client repeats a commit whose reply was lost; committing twice is harmless."""
        compares_siblings = self._parts.batch.drop_no_signal and self._parts.batch.group_size > 1
        keep = has_signal(group.rollouts) if compares_siblings else True
        result = await self._parts.buffer.commit(self._parts.name, group, keep=keep)
        self._num_finished += 1
        self.counters.groups[result] += 1
        self.counters.stored[group.task.environment] += result == "stored"
        if result not in ("stored", "already"):
            self.records.dropped(ticket, result, group)
        if result == "quarantined":
            log.warning("group refused by the buffer", group=group.id, task=group.task.key)

    async def _hand_back(self, group: GroupInFlight, reason: Drop) -> None:
        self.counters.groups[reason] += 1
        self.records.dropped(group.ticket, reason, group.timeline.so_far(group.ticket.id, self._parts.name))
        if reason != "lease_lost":  # then there is nothing left to hand back
            await self._parts.buffer.abandon(self._parts.name, group.ticket.id, reason, tokens=group.tokens)

    def _note_leak(self, environment: str, what: str, names: list[str]) -> None:
        self.counters.leaked[LEAK_METRICS.get(what, what)] += 1
        self.failures.note_leak(environment, what, names)


def _expire(waiting: asyncio.Timeout) -> None:
    """End a wait now: the `async with` raises TimeoutError."""
    waiting.reschedule(asyncio.get_running_loop().time())
