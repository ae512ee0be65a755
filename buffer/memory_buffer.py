"""The reference implementation of the buffer's contract: dictionaries, for tests and for reading.

    reserve ─▶ RESERVED ─commit─▶ READY ─take─▶ TAKEN(step) ─checkpoint─▶ spent
                  └─────────────────┴───────────────┴────────────────────▶ dropped(reason), quarantined

It lives in one event loop, so every method is atomic up to its first await.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from async_rl.errors import FenceLost, LearnerAlreadyRunning
from async_rl.protocols import Audit, BufferStats, Clock, CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    OutstandingTicket,
    PendingTask,
    Recovery,
    RolloutGroup,
    TakenGroup,
    Ticket,
    VersionRecord,
)
from buffer.admission import counts_as_failure, free_slots, goes_again
from buffer.auditing import Snapshot, audit
from buffer.keys import ticket_id, ticket_number
from buffer.selection import choose, is_stale
from buffer.validation import problem_with, problem_with_versions

RECHECK_S = 1.0
"""Leases end without anybody telling, so who waits looks again this often."""
ENDED_REMEMBERED = 10_000
"""Tickets whose end is remembered, so that a repeated commit gets the same answer."""

T = TypeVar("T")


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


@dataclass(slots=True, kw_only=True)
class _Entry:
    ticket: Ticket
    failures: int
    """How often the task's earlier tickets failed."""
    worker: str
    expires: float
    state: Literal["reserved", "ready", "taken"] = "reserved"
    group: RolloutGroup | None = None
    version_at_commit: int = -1
    version_at_take: int = -1
    step: int = -1

    @property
    def rolled(self) -> RolloutGroup:
        assert self.group is not None
        return self.group


@dataclass(slots=True, kw_only=True)
class _Learner:
    """Who holds the run, until when, and how often that was renewed."""

    owner: str
    expires: float
    renewals: int = 0


class MemoryBuffer:
    """`ReplayBuffer` without a server."""

    def __init__(self, clock: Clock | None = None, *, learner_lease_s: float = 10.0) -> None:
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._learner_lease_s = learner_lease_s
        self._limits: Limits | None = None
        self._entries: dict[str, _Entry] = {}
        self._ended: dict[str, CommitResult] = {}
        self._redo: deque[PendingTask] = deque()
        self._next_ticket = 0
        self._next_task = 0
        self._issued = 0
        self._spent = 0
        self._quarantined = 0
        self._dropped: Counter[str] = Counter()
        self._highest_version = -1
        self._versions: dict[int, VersionRecord] = {}
        self._fence = 0
        self._learner: _Learner | None = None
        self._released_step = -1
        self._changed = asyncio.Event()

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        return await self._wait_for(lambda: self._reserve_now(worker, version, count), wait_s)

    def _reserve_now(self, worker: str, version: int, count: int) -> list[Ticket]:
        self._collect_lost_leases()
        free = free_slots(self._limits, used=self._slots_used, live_version=self._live, worker_version=version)
        return [self._issue_ticket(worker) for _ in range(min(count, free))]

    def _issue_ticket(self, worker: str) -> Ticket:
        assert self._limits is not None
        task = self._redo.popleft() if self._redo else self._fresh_task()
        ticket = Ticket(id=ticket_id(self._next_ticket), task_index=task.task_index, version=self._live, attempt=task.attempt)
        expires = self._clock.now() + self._limits.lease_s
        self._entries[ticket.id] = _Entry(ticket=ticket, failures=task.failures, worker=worker, expires=expires)
        self._next_ticket += 1
        self._issued += 1
        return ticket

    def _fresh_task(self) -> PendingTask:
        self._next_task += 1
        return PendingTask(task_index=self._next_task - 1, attempt=1, failures=0)

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        lost = {ticket for ticket in tickets if self._held(worker, ticket) is None}
        for ticket in set(tickets) - lost:
            assert self._limits is not None
            self._entries[ticket].expires = self._clock.now() + self._limits.lease_s
        return lost

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        entry = self._held(worker, group.id)
        if entry is None:
            return self._answer_again(group.id)
        if not keep:
            self._drop(entry, "no_signal")
            return "no_signal"
        if problem_with(group) is not None or self._versions_are_wrong(entry, group):
            self._quarantine(entry)
            return "quarantined"
        entry.state, entry.group, entry.version_at_commit = "ready", group, self._live
        self._notify()
        return "stored"

    def _versions_are_wrong(self, entry: _Entry, group: RolloutGroup) -> bool:
        problem = problem_with_versions(
            oldest=group.oldest_version,
            newest=group.newest_version,
            ticket_version=entry.ticket.version,
            live_version=self._live,
        )
        return problem is not None

    def _answer_again(self, ticket: str) -> CommitResult:
        entry = self._entries.get(ticket)
        if entry is not None:
            return "lease_lost" if entry.state == "reserved" else "already"
        return self._ended.get(ticket, "lease_lost")

    async def abandon(self, worker: str, ticket: str, reason: Drop) -> None:
        entry = self._held(worker, ticket)
        if entry is not None:
            self._drop(entry, reason)

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits) -> int:
        first_seen = self._learner
        renewals = first_seen.renewals if first_seen is not None else 0
        while self._learner is not None and (left := self._learner.expires - self._clock.now()) > 0:
            if self._learner is not first_seen or self._learner.renewals != renewals:
                raise LearnerAlreadyRunning(f"learner {self._learner.owner} holds this run; stop it before starting another")
            await self._change(min(left, RECHECK_S))
        self._learner = _Learner(owner=owner, expires=self._clock.now() + self._learner_lease_s)
        self._fence += 1
        self._limits = limits
        self._notify()
        return self._fence

    async def hold(self, fence: int) -> None:
        learner = self._holder(fence)
        learner.expires = self._clock.now() + self._learner_lease_s
        learner.renewals += 1
        self._notify()

    async def resign(self, fence: int) -> None:
        self._holder(fence).expires = self._clock.now()
        self._notify()

    async def recover(self, fence: int, position: BufferPosition | None) -> Recovery:
        self._holder(fence)
        step = position.step if position is not None else -1
        spent = [entry for entry in self._entries.values() if _contains(position, entry)]
        for entry in spent:
            self._spend(entry)
        returned = self._in("taken")
        for entry in returned:
            entry.state, entry.step, entry.version_at_take = "ready", -1, -1
        self._released_step = step
        if position is not None:
            self._count_on_from(position)
        self._notify()
        return Recovery(version=self._highest_version, returned=len(returned), spent=len(spent))

    def _count_on_from(self, position: BufferPosition) -> None:
        if self._next_ticket < position.next_ticket:  # the server was restored from a backup, or is empty
            lost = [ticket for ticket in position.outstanding if ticket.number >= self._next_ticket]
            self._redo = deque([*position.redo, *(ticket.again for ticket in lost)])
        self._highest_version = max(self._highest_version, position.version)
        self._next_ticket = max(self._next_ticket, position.next_ticket)
        self._next_task = max(self._next_task, position.next_task)

    async def take(
        self,
        fence: int,
        *,
        step: int,
        version: int,
        num_groups: int,
        wait_s: float,
        overtaken: Literal["wait", "drop"] | None = None,
    ) -> list[TakenGroup]:
        return await self._wait_for(lambda: self._take_now(fence, step, version, num_groups, overtaken), wait_s)

    def _take_now(
        self, fence: int, step: int, version: int, num_groups: int, overtaken: Literal["wait", "drop"] | None
    ) -> list[TakenGroup]:
        self._holder(fence)
        self._collect_lost_leases()
        batch = [entry for entry in self._in("taken") if entry.step == step]
        if not batch:
            batch = self._choose(version, num_groups, overtaken)
        for entry in batch:
            if entry.state == "ready":
                entry.state, entry.step, entry.version_at_take = "taken", step, version
        return [
            TakenGroup(group=entry.rolled, version_at_commit=entry.version_at_commit, version_at_take=entry.version_at_take)
            for entry in batch
        ]

    def _choose(self, version: int, num_groups: int, overtaken: Literal["wait", "drop"] | None) -> list[_Entry]:
        assert self._limits is not None
        max_age = self._limits.max_age
        for entry in self._in("ready"):
            if is_stale(entry.rolled.oldest_version, version=version, max_age=max_age):
                self._drop(entry, "stale")
        chosen = choose(
            sorted((entry.rolled.oldest_version, entry.ticket.id) for entry in self._in("ready")),
            Counter(entry.ticket.version for entry in self._in("reserved")),
            version=version,
            num_groups=num_groups,
            missing=num_groups,
            max_age=max_age,
            wait=(overtaken if overtaken is not None else self._limits.overtaken) == "wait",
        )
        return [self._entries[ticket] for ticket in chosen]

    async def issue(self, fence: int) -> int:
        self._holder(fence)
        self._highest_version += 1
        return self._highest_version

    async def publish(self, fence: int, record: VersionRecord) -> None:
        self._holder(fence)
        self._versions[record.version] = record
        self._highest_version = max(self._highest_version, record.version)
        self._notify()

    async def release(self, fence: int, step: int) -> None:
        self._holder(fence)
        self._released_step = max(self._released_step, step)
        self._notify()

    async def position(self, fence: int, step: int) -> BufferPosition:
        self._holder(fence)
        alive = [entry for entry in self._entries.values() if entry.state != "taken" or entry.step > step]
        return BufferPosition(
            step=step,
            version=self._highest_version,
            next_ticket=self._next_ticket,
            next_task=self._next_task,
            redo=tuple(self._redo),
            outstanding=tuple(_outstanding(entry) for entry in alive),
        )

    async def checkpoint(self, fence: int, step: int) -> None:
        self._holder(fence)
        for entry in self._in("taken"):
            if entry.step <= step:
                self._spend(entry)
        self._notify()

    # -- anybody ----------------------------------------------------------------------------------------------------
    async def stats(self) -> BufferStats:
        self._collect_lost_leases()
        ready = self._in("ready")
        return BufferStats(
            reserved=len(self._in("reserved")),
            ready=len(ready),
            taken=len(self._in("taken")),
            spent=self._spent,
            dropped=dict(self._dropped),
            quarantined=self._quarantined,
            issued=self._issued,
            slots=self._limits.slots if self._limits is not None else 0,
            slots_used=self._slots_used,
            version=self._live,
            fence=self._fence,
            bytes=sum(_size(entry.group) for entry in self._entries.values() if entry.group is not None),
            ready_by_version=dict(sorted(Counter(entry.rolled.oldest_version for entry in ready).items())),
        )

    async def audit(self) -> Audit:
        reserved = _ids(self._in("reserved"))
        return audit(
            Snapshot(
                stats=await self.stats(),
                leased=reserved,
                reserved=reserved,
                ready=_ids(self._in("ready")),
                taken=_ids(self._in("taken")),
                recorded=self._entries.keys(),
                payloads={ticket: _size(entry.group) for ticket, entry in self._entries.items() if entry.group is not None},
            )
        )

    @property
    def published(self) -> list[VersionRecord]:
        """The version table, oldest first."""
        return [self._versions[version] for version in sorted(self._versions)]

    # -- how tickets end --------------------------------------------------------------------------------------------
    def _drop(self, entry: _Entry, reason: Drop) -> None:
        self._dropped[reason] += 1
        self._end(entry, "no_signal" if reason == "no_signal" else "already" if entry.group is not None else "lease_lost")
        self._roll_again(entry, reason)

    def _quarantine(self, entry: _Entry) -> None:
        self._quarantined += 1
        self._end(entry, "quarantined")
        self._roll_again(entry, None)

    def _spend(self, entry: _Entry) -> None:
        self._spent += 1
        self._end(entry, "already")

    def _end(self, entry: _Entry, answer: CommitResult) -> None:
        del self._entries[entry.ticket.id]
        self._ended[entry.ticket.id] = answer
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._notify()

    def _roll_again(self, entry: _Entry, reason: Drop | None) -> None:
        assert self._limits is not None
        failures = entry.failures + counts_as_failure(reason)
        if goes_again(reason, failures=failures, max_attempts=self._limits.max_attempts):
            self._redo.append(
                PendingTask(task_index=entry.ticket.task_index, attempt=entry.ticket.attempt + 1, failures=failures)
            )

    def _collect_lost_leases(self) -> None:
        now = self._clock.now()
        for entry in self._in("reserved"):
            if entry.expires <= now:
                self._drop(entry, "lease_lost")

    # -- looking things up ------------------------------------------------------------------------------------------
    @property
    def _live(self) -> int:
        return max(self._versions, default=-1)

    @property
    def _slots_used(self) -> int:
        return sum(entry.state != "taken" or entry.step > self._released_step for entry in self._entries.values())

    def _in(self, state: Literal["reserved", "ready", "taken"]) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.state == state]

    def _held(self, worker: str, ticket: str) -> _Entry | None:
        entry = self._entries.get(ticket)
        return entry if entry is not None and entry.state == "reserved" and entry.worker == worker else None

    def _holder(self, fence: int) -> _Learner:
        if self._learner is None or fence != self._fence:
            raise FenceLost(f"learner {fence} was replaced by learner {self._fence} and may change nothing any more")
        return self._learner

    # -- waiting ----------------------------------------------------------------------------------------------------
    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _wait_for(self, attempt: Callable[[], list[T]], wait_s: float) -> list[T]:
        deadline = time.monotonic() + wait_s
        while not (found := attempt()) and (left := deadline - time.monotonic()) > 0:
            await self._change(min(left, RECHECK_S))
        return found


def _contains(position: BufferPosition | None, entry: _Entry) -> bool:
    """Whether a checkpoint says that this ticket has ended, even if the server, restored from a backup, does not know."""
    if position is None:
        return False
    if entry.state == "taken" and entry.step <= position.step:
        return True
    number = ticket_number(entry.ticket.id)
    return number < position.next_ticket and all(number != ticket.number for ticket in position.outstanding)


def _outstanding(entry: _Entry) -> OutstandingTicket:
    ticket = entry.ticket
    return OutstandingTicket(
        number=ticket_number(ticket.id), task_index=ticket.task_index, attempt=ticket.attempt, failures=entry.failures
    )


def _ids(entries: Iterable[_Entry]) -> set[str]:
    return {entry.ticket.id for entry in entries}


def _size(group: RolloutGroup | None) -> int:
    if group is None:
        return 0
    return sum(s.token_ids.nbytes + s.loss_mask.nbytes + s.logprobs.nbytes for r in group.rollouts for s in r.samples)
