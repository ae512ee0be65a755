"""The reference implementation of `ReplayBuffer`: the state machine of state_machine.py, with waits and fences.

It runs in one event loop, so every method is atomic up to its first await.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from async_rl.errors import FenceLost, LearnerAlreadyRunning
from async_rl.payloads.codec import encode
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
from buffer.reference.state_machine import StateMachine
from buffer.rules.audit import BufferSnapshot, audit
from buffer.rules.limits_text import write_changes
from buffer.rules.ticket_record import STATES, TicketState

RECHECK_S = 1.0
"""A wait repeats its attempt this often: nothing announces the end of a lease."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Learner:
    """The learner's lease: its owner, its end, and how often it was renewed."""

    owner: str
    expires: float
    renewals: int = 0


class MemoryBuffer:
    def __init__(self, now: Callable[[], float] = time.monotonic, *, learner_lease_s: float = 10.0) -> None:
        self.now = now
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
            return self._machine.reserve(worker, version, count, waits=wait_s > 0, now=self.now())

        tickets = await self.wait_for(attempt, wait_s)
        self.notify()  # the next worker in the queue
        return tickets

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        entries = {ticket: self._machine.held(worker, ticket) for ticket in tickets}
        for entry in entries.values():
            if entry is not None and self._machine.limits is not None:
                entry.expires = self.now() + self._machine.limits.lease_s
        return {ticket for ticket, entry in entries.items() if entry is None}

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        result = self._machine.commit(worker, group, keep=keep)
        self.notify()
        return result

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, tokens: int = 0) -> None:
        entry = self._machine.held(worker, ticket)
        if entry is not None:
            self._machine.drop(entry, reason, tokens=tokens)
            self.notify()

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits, *, after: int = 0, succeeds: str = "") -> int:
        first_seen = self._learner
        renewals = first_seen.renewals if first_seen is not None else 0
        while self._learner is not None and (left := self._learner.expires - self.now()) > 0:
            if self._learner.owner == succeeds:
                break
            if self._learner is not first_seen or self._learner.renewals != renewals:
                raise LearnerAlreadyRunning(f"learner {self._learner.owner} holds this run; stop it before starting another")
            await self._change(min(left, RECHECK_S))
        self._learner = _Learner(owner=owner, expires=self.now() + self._learner_lease_s)
        self._fence = max(self._fence, after) + 1
        self._machine.limits = replace(limits, **self._overrides)
        self._machine.recovering = True
        self.notify()
        return self._fence

    async def hold(self, fence: int) -> None:
        learner = self._holder(fence)
        learner.expires = self.now() + self._learner_lease_s
        learner.renewals += 1
        self.notify()

    async def resign(self, fence: int) -> None:
        self._holder(fence).expires = self.now()
        self.notify()

    async def recover(self, fence: int, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        with self._change_by(fence) as machine:
            return machine.recover(position, undone)

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
            return self._machine.take(step, version, num_groups, max_tokens, patient=patient, now=self.now())

        return await self.wait_for(attempt, wait_s)

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        with self._change_by(fence) as machine:
            machine.prioritize(weights)

    async def issue(self, fence: int, *, after: int) -> int:
        with self._change_by(fence) as machine:
            return machine.issue(after)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        with self._change_by(fence) as machine:
            machine.publish(record)

    async def release(self, fence: int, step: int) -> None:
        with self._change_by(fence) as machine:
            machine.release(step)

    async def position(self, fence: int, step: int) -> BufferPosition:
        with self._change_by(fence) as machine:
            return machine.position(step)

    async def checkpoint(self, fence: int, step: int) -> None:
        with self._change_by(fence) as machine:
            machine.checkpoint(step)

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        kept = sorted(self._machine.among("kept"), key=lambda entry: (entry.steps[-1], entry.ticket.id))
        return [
            SpentGroup(id=entry.ticket.id, step=entry.steps[-1], payload=encode(entry.committed_group))
            for entry in kept[:limit]
        ]

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        with self._change_by(fence) as machine:
            machine.discard(groups)

    async def set_limit(self, fence: int, name: Literal["max_age", "pace"], value: float) -> None:
        with self._change_by(fence) as machine:
            if not (name == "pace" and "pace" in self._overrides):
                machine.change_limits({name: value})

    # -- any role ---------------------------------------------------------------------------------------------------
    async def change_limits(self, changes: Mapping[str, Any]) -> None:
        write_changes(changes)  # raises for what cannot change
        for name in [name for name, value in changes.items() if value == "auto"]:
            self._overrides.pop(name, None)
        fixed = {name: value for name, value in changes.items() if value != "auto"}
        self._overrides |= fixed
        self._machine.change_limits(fixed)
        self.notify()

    async def mix(self) -> tuple[MixChange, ...]:
        return tuple(self._machine.mix)

    async def change_mix(self, known: str, change: str) -> MixChange | None:
        return self._machine.change_mix(known, change)

    async def stats(self) -> BufferStats:
        machine = self._machine
        machine.collect_lost_leases(self.now())
        placed: dict[str, Any] = {state: len(machine.among(state)) for state in STATES}
        return BufferStats(
            **placed,
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
            tokens=dict(machine.tokens),
            ready_by_version=dict(
                sorted(Counter(entry.committed_group.oldest_version for entry in machine.among("ready")).items())
            ),
        )

    async def audit(self) -> Audit:
        machine, stats = self._machine, await self.stats()  # collects expired leases first
        places: dict[TicketState, set[str]] = {state: {entry.ticket.id for entry in machine.among(state)} for state in STATES}
        return audit(
            BufferSnapshot(
                stats=stats,
                places=places,
                leased=places["reserved"],
                drawn=places["ready"] | places["again"],
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

    @contextmanager
    def _change_by(self, fence: int) -> Generator[StateMachine]:
        """Let the learner with this fence change the state, and notify those who wait. Raises FenceLost."""
        self._holder(fence)
        yield self._machine
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def wait_for(self, attempt: Callable[[], list[T]], wait_s: float) -> list[T]:
        deadline = time.monotonic() + wait_s
        while not (found := attempt()) and (left := deadline - time.monotonic()) > 0:
            await self._change(min(left, RECHECK_S))
        return found


def _size(group: RolloutGroup | None) -> int:
    if group is None:
        return 0
    return sum(s.token_ids.nbytes + s.loss_mask.nbytes + s.logprobs.nbytes for r in group.rollouts for s in r.samples)
