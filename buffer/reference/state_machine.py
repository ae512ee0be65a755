"""The buffer's state machine in dictionaries: the same transitions as the scripts perform in Redis.

    reserve ─▶ RESERVED ─commit─▶ READY ─take─▶ TAKEN(step) ─checkpoint─▶ spent, and KEPT for a while
                  │                 │              │   ▲
                  │                 │              ▼   │ take      (only where a group may train several steps)
                  │                 │            AGAIN ┘
                  └─────────────────┴──▶ dropped(reason), quarantined

Every method is one atomic change. memory_buffer.py adds waiting, fences and the learner's lease.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_rl.replay_protocol import CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    MixChange,
    OutstandingTicket,
    PendingTask,
    Recovery,
    RolloutGroup,
    TakenGroup,
    Ticket,
    UndoneGroup,
    VersionRecord,
)
from buffer import mix_log
from buffer.keys import ticket_id, ticket_number
from buffer.payloads.validation import problem_with
from buffer.rules.admission import counts_as_failure, free_tickets, goes_again, may_sample, share
from buffer.rules.recovery import outstanding_steps, rewound, surviving_steps
from buffer.rules.selection import Candidate, fill, is_stale, ordered, overtakes_a_straggler
from buffer.rules.ticket_record import TicketState
from buffer.rules.weighted_draw import draw, rescaled

ENDED_REMEMBERED = 10_000
"""Ended tickets that are remembered, so that a repeated commit returns the same result."""
SILENT_S = 2.5
"""A waiting worker asks at least once a second; one silent for this long leaves the queue."""


@dataclass(slots=True, kw_only=True)
class TicketEntry:
    """A ticket that has not ended, or the spent group that is kept of it."""

    ticket: Ticket
    failures: int
    """Failed earlier tickets of the task."""
    worker: str
    expires: float
    state: TicketState = "reserved"
    group: RolloutGroup | None = None
    version_at_commit: int = -1
    version_at_take: int = -1
    tokens: int = 0
    """Generated for it, prompts included."""
    steps: tuple[int, ...] = ()
    """Steps that it was taken for."""
    draw: float = 0.0

    @property
    def committed_group(self) -> RolloutGroup:
        assert self.group is not None
        return self.group

    @property
    def candidate(self) -> Candidate:
        group = self.committed_group
        return Candidate(
            id=group.id,
            oldest=group.oldest_version,
            tokens=group.num_tokens,
            environment=group.task.environment,
            uses=len(self.steps),
            draw=self.draw,
        )


class StateMachine:
    """Tickets, groups, counters and the task queue of one run."""

    def __init__(self) -> None:
        self.limits: Limits | None = None
        self.entries: dict[str, TicketEntry] = {}
        self.versions: dict[int, VersionRecord] = {}
        self.spent = self.lost_to_rollback = self.issued = self.quarantined = self.expired = 0
        self.dropped: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """`generated`, and by fate."""
        self.owed = 0.0
        self._debt = 0.0
        """Uses beyond samples_per_insert by groups that have ended; at most 0."""
        self.recovering = False
        self.mix: list[MixChange] = []
        self._ended: dict[str, CommitResult] = {}
        self._undone: set[str] = set()
        self._redo: deque[PendingTask] = deque()
        self._next_ticket = self._next_task = self._untrained = 0
        self._highest_version = -1
        self._last_step: int | None = None
        self._released_step = self._saved_step = -1
        self._queue: dict[str, float] = {}
        """Waiting worker -> its latest request, in the order of their first."""
        self._weights: dict[str, float] = {}
        self._draw_time = 0.0

    def change_limits(self, changes: Mapping[str, Any]) -> None:
        if self.limits is not None:
            self.limits = replace(self.limits, **changes)

    # -- the worker's side ------------------------------------------------------------------------------------------
    def reserve(self, worker: str, version: int, count: int, *, waits: bool, now: float) -> list[Ticket]:
        self.collect_lost_leases(now)
        if self.limits is None or self.recovering or self.live < 0 or version < self.live:
            return []
        count = self._share(worker, count, waits=waits, now=now)
        return [self._issue_ticket(worker, now + self.limits.lease_s) for _ in range(count)]

    def _share(self, worker: str, count: int, *, waits: bool, now: float) -> int:
        self._queue = {name: asked for name, asked in self._queue.items() if asked > now - SILENT_S}
        names = list(self._queue)
        ahead = names.index(worker) if worker in names else len(names)
        queue = len(names) + (worker not in names)
        granted = share(self.free_tickets, asked=count, ahead=ahead, queue=queue)
        if granted:
            self._queue.pop(worker, None)
        elif waits:
            self._queue[worker] = now
        return granted

    def _issue_ticket(self, worker: str, expires: float) -> Ticket:
        task = self._redo.popleft() if self._redo else self._fresh_task()
        ticket = Ticket(
            id=ticket_id(self._next_ticket),
            task_index=task.task_index,
            version=self.live,
            attempt=task.attempt,
            mix=self._latest_change,
        )
        self.entries[ticket.id] = TicketEntry(ticket=ticket, failures=task.failures, worker=worker, expires=expires)
        self._next_ticket += 1
        self.issued += 1
        return ticket

    def _fresh_task(self) -> PendingTask:
        self._next_task += 1
        return PendingTask(task_index=self._next_task - 1, attempt=1, failures=0)

    def held(self, worker: str, ticket: str) -> TicketEntry | None:
        """Return the ticket's entry if this worker may still commit it."""
        entry = self.entries.get(ticket)
        return entry if entry is not None and entry.state == "reserved" and entry.worker == worker else None

    def commit(self, worker: str, group: RolloutGroup, *, keep: bool) -> CommitResult:
        entry = self.held(worker, group.id)
        if entry is None:
            return self._repeated_answer(group.id)
        if not keep:
            self.drop(entry, "no_signal", tokens=group.num_tokens)
            return "no_signal"
        if (
            problem_with(group) is not None
            or not entry.ticket.version <= group.oldest_version <= group.newest_version <= self.live
        ):
            self._quarantine(entry)
            return "quarantined"
        entry.group, entry.version_at_commit = group, self.live
        self._generate(entry, group.num_tokens)
        self._become_ready(entry)
        self._owe(self._samples_per_insert)
        return "stored"

    def _generate(self, entry: TicketEntry, tokens: int) -> None:
        entry.tokens = tokens
        self.tokens["generated"] += tokens

    def _repeated_answer(self, ticket: str) -> CommitResult:
        entry = self.entries.get(ticket)
        if entry is not None:
            return "lease_lost" if entry.state == "reserved" else "already"
        return self._ended.get(ticket, "lease_lost")

    # -- the learner's side -----------------------------------------------------------------------------------------
    def take(
        self, step: int, version: int, num_groups: int, max_tokens: int | None, *, patient: bool, now: float
    ) -> list[TakenGroup]:
        if self.recovering or (self._last_step is not None and step > self._last_step + 1):
            raise rewound()
        batch = [entry for entry in self.among("taken") if entry.steps[-1] == step]
        if self._last_step is None or step > self._last_step:
            self.collect_lost_leases(now)
            self._retire_stale(version)
            chosen = self._choose(batch, version, num_groups, max_tokens, patient=patient)
            if chosen is None:
                return []
            if self._bounds.selector in ("uniform", "prioritized"):
                self._draw_time = max(self._draw_time, *(entry.draw for entry in chosen))
            for entry in chosen:
                entry.state, entry.version_at_take = "taken", version
                entry.steps += (step,)
            self._owe(-len(chosen))
            self._last_step = step
            batch += chosen
        for entry in batch:
            entry.version_at_take = version
        return [
            TakenGroup(
                group=entry.committed_group,
                version_at_commit=entry.version_at_commit,
                version_at_take=entry.version_at_take,
                task_index=entry.ticket.task_index,
                attempt=entry.ticket.attempt,
            )
            for entry in batch
        ]

    def _retire_stale(self, version: int) -> None:
        for entry in self.among("ready", "again"):
            if not is_stale(entry.committed_group.oldest_version, version=version, age_bound=self._bounds.age_bound):
                continue
            if entry.state == "ready":
                self.drop(entry, "stale")
            elif entry.steps[-1] <= self._saved_step:
                self._spend(entry)
            else:  # back to taken: the checkpoint of its last step spends it
                entry.state = "taken"

    def _choose(
        self, batch: Sequence[TicketEntry], version: int, num_groups: int, max_tokens: int | None, *, patient: bool
    ) -> list[TicketEntry] | None:
        limits = self._bounds
        ready = [entry.candidate for entry in self.among("ready", "again")]
        reserved = Counter(entry.ticket.version for entry in self.among("reserved"))
        nothing_else_can_come = self._is_idle and self.free_tickets <= 0
        chosen = fill(
            ordered(ready, limits.selector),
            batch=[entry.candidate for entry in batch],
            version=version,
            num_groups=num_groups,
            max_tokens=max_tokens,
            limits=limits,
            nothing_else_can_come=nothing_else_can_come,
        )
        if chosen is None:
            return None
        if not nothing_else_can_come and not may_sample(limits, ready=len(ready), owed=self.owed, uses=len(chosen)):
            return None
        if (
            limits.selector == "windowed_fifo"
            and patient
            and overtakes_a_straggler(chosen, reserved, version=version, num_groups=num_groups, age_bound=limits.age_bound)
        ):
            return None
        return [self.entries[candidate.id] for candidate in chosen]

    def prioritize(self, weights: Mapping[str, float]) -> None:
        for ticket, weight in weights.items():
            entry = self.entries.get(ticket)
            if entry is None or entry.state == "kept":
                continue
            before = self._weight(ticket)
            self._weights[ticket] = weight
            if entry.state in ("ready", "again"):
                entry.draw = rescaled(entry.draw, before=before, after=self._weight(ticket), time=self._draw_time)

    def issue(self, after: int) -> int:
        if self._highest_version != after + 1:
            self._highest_version = max(self._highest_version, after) + 1
        return self._highest_version

    def publish(self, record: VersionRecord) -> None:
        self.versions[record.version] = record
        self._highest_version = max(self._highest_version, record.version)

    def release(self, step: int) -> None:
        for entry in self.among("taken"):
            if self._released_step < entry.steps[-1] <= step and len(entry.steps) < self._bounds.max_uses:
                self._become_ready(entry)
        self._released_step = max(self._released_step, step)

    def checkpoint(self, step: int) -> None:
        self._saved_step = max(self._saved_step, step)
        self.release(step)
        for entry in self.among("taken"):
            if entry.steps[-1] <= step:
                self._spend(entry)
        for entry in self.among("kept"):
            if entry.steps[-1] <= step - self._bounds.keep_steps:
                del self.entries[entry.ticket.id]
                self.expired += 1

    def discard(self, groups: Iterable[str]) -> None:
        for ticket in groups:
            if (entry := self.entries.get(ticket)) is not None and entry.state == "kept":
                del self.entries[ticket]

    # -- after a crash ----------------------------------------------------------------------------------------------
    def position(self, step: int) -> BufferPosition:
        if self._last_step is not None and step > self._last_step:
            raise rewound()
        return BufferPosition(
            step=step,
            version=self._highest_version,
            next_ticket=self._next_ticket,
            next_task=self._next_task,
            untrained=self._untrained,
            redo=tuple(self._redo),
            outstanding=tuple(
                OutstandingTicket(ticket_number(ticket), entry.ticket.task_index, entry.ticket.attempt, entry.failures, steps)
                for ticket, entry in self.entries.items()
                if (steps := outstanding_steps(entry.state, entry.steps, step)) is not None
            ),
            mix=tuple(self.mix),
        )

    def recover(self, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        spent_before = self.spent
        taken = self.among("taken")
        outstanding = {ticket.number: ticket for ticket in position.outstanding} if position is not None else {}
        for entry in self.among("reserved", "ready", "again", "taken"):
            number = ticket_number(entry.ticket.id)
            self._settle(entry, surviving_steps(number, entry.state, entry.steps, position, outstanding))
        is_older = position is not None and self._next_ticket < position.next_ticket  # restored from a backup, or empty
        lost_groups = 0 if is_older else self._undo(undone)
        if position is not None and is_older:
            lost = [ticket for ticket in position.outstanding if ticket_id(ticket.number) not in self.entries]
            self._redo = deque([*position.redo, *(ticket.again for ticket in lost)])
            self.mix = list(position.mix)
            self._untrained = position.untrained
        if position is not None:
            self._highest_version = max(self._highest_version, position.version)
            self._next_ticket = max(self._next_ticket, position.next_ticket)
            self._next_task = max(self._next_task, position.next_task)
        self._released_step = self._saved_step = position.step if position is not None else -1
        self._last_step = max(self._saved_step, 0)
        self.recovering = False
        returned = sum(entry.state != "taken" and entry.ticket.id in self.entries for entry in taken)
        spent = self.spent - spent_before
        self.spent -= lost_groups
        return Recovery(version=self._highest_version, returned=returned, spent=spent, lost=lost_groups)

    def _undo(self, groups: Sequence[UndoneGroup]) -> int:
        """Roll the tasks of those groups again that were spent; returns how many they are."""
        spent = [
            group
            for group in groups
            if ticket_number(group.id) < self._next_ticket
            and ((entry := self.entries.get(group.id)) is None or entry.state == "kept")
            and self._ended.get(group.id, "already") == "already"
            and group.id not in self._undone
        ]
        self._redo += [PendingTask(group.task_index, group.attempt + 1, 0) for group in spent]
        self._undone |= {group.id for group in spent}
        self.lost_to_rollback += len(spent)
        return len(spent)

    def _settle(self, entry: TicketEntry, steps: tuple[int, ...] | None) -> None:
        if steps is None or len(steps) >= self._bounds.max_uses:
            if steps is not None:
                entry.steps = steps
            self._spend(entry)
        elif entry.state in ("taken", "again"):
            self._owe(len(entry.steps) - len(steps))
            entry.steps, entry.version_at_take = steps, -1 if entry.state == "taken" else entry.version_at_take
            self._become_ready(entry)

    # -- the mix of environments ------------------------------------------------------------------------------------
    def change_mix(self, known: str, change: str) -> MixChange | None:
        if self.mix and self.mix[-1] == mix_log.follow_up(known, self.mix[-1].at, change):
            return self.mix[-1]
        if self._latest_change != known or self.recovering:
            return None
        if len(self.mix) >= mix_log.CHANGES_MOST:
            raise mix_log.full()
        self.mix.append(mix_log.follow_up(known, self._next_task, change))
        return self.mix[-1]

    @property
    def _latest_change(self) -> str:
        return self.mix[-1].id if self.mix else ""

    # -- how tickets change and end ---------------------------------------------------------------------------------
    def _become_ready(self, entry: TicketEntry) -> None:
        entry.state = "again" if entry.steps else "ready"
        ticket = entry.ticket.id
        entry.draw = draw(ticket, uses=len(entry.steps), weight=self._weight(ticket), time=self._draw_time)

    def drop(self, entry: TicketEntry, reason: Drop, *, tokens: int = 0) -> None:
        if tokens:
            self._generate(entry, tokens)
        self.dropped[reason] += 1
        answer = "no_signal" if reason == "no_signal" else "lease_lost" if entry.state == "reserved" else "already"
        self._end(entry, answer, reason)
        self._roll_again(entry, reason)

    def _quarantine(self, entry: TicketEntry) -> None:
        self.quarantined += 1
        self._end(entry, "quarantined", "quarantined")
        self._roll_again(entry, None)

    def _spend(self, entry: TicketEntry) -> None:
        self.spent += 1
        self._end(entry, "already", "trained")
        if self._bounds.keep_steps and entry.group is not None:
            entry.state = "kept"
            entry.steps = entry.steps if entry.steps else (max(self._saved_step, 0),)
            self.entries[entry.ticket.id] = entry

    def _end(self, entry: TicketEntry, answer: CommitResult, fate: str) -> None:
        del self.entries[entry.ticket.id]
        if entry.tokens:
            self.tokens[fate] += entry.tokens
        self._weights.pop(entry.ticket.id, None)
        if entry.state != "reserved":
            self._settle_debt(len(entry.steps))
        self._ended[entry.ticket.id] = answer
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _settle_debt(self, uses: int) -> None:
        """Settle `owed` for a group that ends: unused samples are no longer owed; uses beyond samples_per_insert are carried
        over until groups with fewer uses offset them.
        """
        unused, debt = self._samples_per_insert - uses, self._debt
        if self._bounds.samples_per_insert is not None:
            self._debt = min(0.0, debt + unused)
            self._owe(self._debt - debt - unused)

    def _roll_again(self, entry: TicketEntry, reason: Drop | None) -> None:
        failures = entry.failures + counts_as_failure(reason)
        if goes_again(reason, failures=failures, max_attempts=self._bounds.max_attempts):
            ticket = entry.ticket
            self._redo.append(PendingTask(task_index=ticket.task_index, attempt=ticket.attempt + 1, failures=failures))
        else:
            self._untrained += 1

    def collect_lost_leases(self, now: float) -> None:
        for entry in sorted(self.among("reserved"), key=lambda entry: entry.expires):
            if entry.expires <= now:
                self.drop(entry, "lease_lost")

    # -- looking things up ------------------------------------------------------------------------------------------
    def among(self, *states: TicketState) -> list[TicketEntry]:
        return [entry for entry in self.entries.values() if entry.state in states]

    @property
    def live(self) -> int:
        return max(self.versions, default=-1)

    @property
    def slots_used(self) -> int:
        return len(self.among("reserved", "ready")) + self._in_training

    @property
    def _in_training(self) -> int:
        return sum(entry.steps[-1] > self._released_step for entry in self.among("taken"))

    @property
    def free_tickets(self) -> int:
        return free_tickets(
            self._bounds,
            used=self.slots_used,
            reserved=len(self.among("reserved")),
            ready=len(self.among("ready", "again")),
            owed=self.owed,
            is_idle=self._is_idle,
        )

    @property
    def _is_idle(self) -> bool:
        """Nothing is being rolled out or trained."""
        return not self.among("reserved") and not self._in_training

    @property
    def _bounds(self) -> Limits:
        assert self.limits is not None
        return self.limits

    @property
    def _samples_per_insert(self) -> float:
        per_insert = self._bounds.samples_per_insert
        return per_insert if per_insert is not None else 0.0

    def _owe(self, uses: float) -> None:
        if self._bounds.samples_per_insert is not None:
            self.owed += uses

    def _weight(self, ticket: str) -> float:
        return 1.0 if self._bounds.selector == "uniform" else self._weights.get(ticket, 1.0)
