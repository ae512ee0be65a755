"""The reference implementation of `ReplayBuffer`: the state machine of state_machine.py, with waits and fences.

It runs in one event loop, so every method is atomic up to its first await.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from async_rl.errors import FenceLost, LearnerAlreadyRunning
from async_rl.protocols import Clock
from async_rl.replay_protocol import Audit, BufferStats, CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    MixChange,
    Recovery,
    RolloutGroup,
    SpentGroup,
    TakenGroup,
    Ticket,
    UndoneGroup,
    VersionRecord,
)
from buffer.payloads.codec import encode
from buffer.reference.state_machine import StateMachine, TicketEntry
from buffer.rules.audit import BufferSnapshot, audit
from buffer.rules.limits_text import write_changes

RECHECK_S = 1.0
"""A wait repeats its attempt this often: nothing announces the end of a lease."""

T = TypeVar("T")


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


@dataclass(slots=True, kw_only=True)
class _Learner:
    """The learner's lease: its owner, its end, and how often it was renewed."""

    owner: str
    expires: float
    renewals: int = 0


class MemoryBuffer:
    """`ReplayBuffer` without a server."""

    def __init__(self, clock: Clock | None = None, *, learner_lease_s: float = 10.0) -> None:
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._learner_lease_s = learner_lease_s
        self._machine = StateMachine()
        self._overrides: dict[str, Any] = {}
        self._fence = 0
        self._learner: _Learner | None = None
        self._changed = asyncio.Event()

    @property
    def fence(self) -> int | None:
        """The latest learner's fence; None before the first."""
        return self._fence if self._fence > 0 else None

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        def attempt() -> list[Ticket]:
            return self._machine.reserve(worker, version, count, waits=wait_s > 0, now=self._clock.now())

        tickets = await self._wait_for(attempt, wait_s)
        self._notify()  # the next worker in the queue
        return tickets

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        entries = {ticket: self._machine.held(worker, ticket) for ticket in tickets}
        for entry in entries.values():
            if entry is not None and self._machine.limits is not None:
                entry.expires = self._clock.now() + self._machine.limits.lease_s
        return {ticket for ticket, entry in entries.items() if entry is None}

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        result = self._machine.commit(worker, group, keep=keep)
        self._notify()
        return result

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, environment: str = "") -> None:
        entry = self._machine.held(worker, ticket)
        if entry is not None:
            self._machine.drop(entry, reason)
            self._notify()

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits, *, after: int = 0) -> int:
        first_seen = self._learner
        renewals = first_seen.renewals if first_seen is not None else 0
        while self._learner is not None and (left := self._learner.expires - self._clock.now()) > 0:
            if self._learner is not first_seen or self._learner.renewals != renewals:
                raise LearnerAlreadyRunning(f"learner {self._learner.owner} holds this run; stop it before starting another")
            await self._change(min(left, RECHECK_S))
        self._learner = _Learner(owner=owner, expires=self._clock.now() + self._learner_lease_s)
        self._fence = max(self._fence, after) + 1
        self._machine.limits = replace(limits, **self._overrides)
        self._machine.recovering = True
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

    async def recover(self, fence: int, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        self._holder(fence)
        recovery = self._machine.recover(position, undone)
        self._notify()
        return recovery

    async def take(
        self,
        fence: int,
        *,
        step: int,
        version: int,
        num_groups: int,
        wait_s: float,
        max_tokens: int | None = None,
        patient: bool = True,
    ) -> list[TakenGroup]:
        def attempt() -> list[TakenGroup]:
            self._holder(fence)
            return self._machine.take(step, version, num_groups, max_tokens, patient=patient, now=self._clock.now())

        return await self._wait_for(attempt, wait_s)

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        self._holder(fence)
        self._machine.prioritize(weights)

    async def issue(self, fence: int, *, after: int) -> int:
        self._holder(fence)
        return self._machine.issue(after)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        self._holder(fence)
        self._machine.publish(record)
        self._notify()

    async def release(self, fence: int, step: int) -> None:
        self._holder(fence)
        self._machine.release(step)
        self._notify()

    async def position(self, fence: int, step: int) -> BufferPosition:
        self._holder(fence)
        return self._machine.position(step)

    async def checkpoint(self, fence: int, step: int) -> None:
        self._holder(fence)
        self._machine.checkpoint(step)
        self._notify()

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        kept = sorted(self._machine.among("kept"), key=lambda entry: (entry.steps[-1], entry.ticket.id))
        return [
            SpentGroup(id=entry.ticket.id, step=entry.steps[-1], payload=encode(entry.committed_group))
            for entry in kept[:limit]
        ]

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        self._holder(fence)
        self._machine.discard(groups)

    async def set_max_age(self, fence: int, max_age: float) -> None:
        self._holder(fence)
        if self._machine.limits is not None:
            self._machine.limits = replace(self._machine.limits, max_age=max_age)
        self._notify()

    # -- any role ---------------------------------------------------------------------------------------------------
    async def change_limits(self, changes: Mapping[str, Any]) -> None:
        write_changes(changes)  # raises for what cannot change
        self._overrides |= changes
        if self._machine.limits is not None:
            self._machine.limits = replace(self._machine.limits, **changes)
        self._notify()

    async def mix(self) -> tuple[MixChange, ...]:
        return tuple(self._machine.mix)

    async def change_mix(self, known: str, change: str) -> MixChange | None:
        return self._machine.change_mix(known, change)

    async def stats(self) -> BufferStats:
        machine = self._machine
        machine.collect_lost_leases(self._clock.now())
        ready = machine.among("ready")
        return BufferStats(
            reserved=len(machine.among("reserved")),
            ready=len(ready),
            again=len(machine.among("again")),
            taken=len(machine.among("taken")),
            kept=len(machine.among("kept")),
            spent=machine.spent,
            dropped=dict(machine.dropped),
            quarantined=machine.quarantined,
            issued=machine.issued,
            lost_to_rollback=machine.lost_to_rollback,
            expired=machine.expired,
            slots=machine.limits.slots if machine.limits is not None else 0,
            slots_used=machine.slots_used,
            owed=machine.owed,
            version=machine.live,
            fence=self._fence,
            bytes=sum(_size(entry.group) for entry in machine.entries.values()),
            starving=False,
            ready_by_version=dict(sorted(Counter(entry.committed_group.oldest_version for entry in ready).items())),
        )

    async def audit(self) -> Audit:
        machine, stats = self._machine, await self.stats()  # collects expired leases first
        ready, again = _ids(machine.among("ready")), _ids(machine.among("again"))
        reserved = _ids(machine.among("reserved"))
        return audit(
            BufferSnapshot(
                stats=stats,
                leased=reserved,
                reserved=reserved,
                ready=ready,
                again=again,
                taken=_ids(machine.among("taken")),
                kept=_ids(machine.among("kept")),
                drawn=ready | again,
                recorded=machine.entries.keys(),
                payloads={ticket: _size(entry.group) for ticket, entry in machine.entries.items() if entry.group is not None},
            )
        )

    @property
    def published(self) -> list[VersionRecord]:
        """The version table, oldest first."""
        return [self._machine.versions[version] for version in sorted(self._machine.versions)]

    # -- waiting ----------------------------------------------------------------------------------------------------
    def _holder(self, fence: int) -> _Learner:
        """Return the learner with this fence. Raises FenceLost for any but the latest."""
        if self._learner is None or fence != self._fence:
            raise FenceLost(f"learner {fence} was replaced by learner {self._fence} and may no longer change anything")
        return self._learner

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


def _ids(entries: Iterable[TicketEntry]) -> set[str]:
    return {entry.ticket.id for entry in entries}


def _size(group: RolloutGroup | None) -> int:
    if group is None:
        return 0
    return sum(s.token_ids.nbytes + s.loss_mask.nbytes + s.logprobs.nbytes for r in group.rollouts for s in r.samples)
