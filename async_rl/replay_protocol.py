"""The seam of the replay buffer: what workers and the learner may expect of it, and the numbers that pace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any, Literal, Protocol

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

Drop = Literal["stale", "lease_lost", "no_signal", "failed", "abandoned", "detached"]
"""Why a ticket ended without being trained on. Every drop is counted under its reason."""

Selector = Literal["windowed_fifo", "fifo", "freshest", "uniform", "prioritized"]
"""Which ready groups leave first. The two kinds of fifo take the oldest, groups that never trained before others;
`windowed_fifo` also waits for a straggler that would become too old.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that pace the fleet. They live in the buffer, so that they hold for everybody at once."""

    max_age: float
    groups_per_step: int
    lease_s: float
    """How long a ticket lives without being renewed."""
    max_attempts: int
    """A task whose tickets failed this often is not tried again."""
    selector: Selector = "windowed_fifo"
    max_uses: int = 1
    """How many steps one group may train."""
    samples_per_insert: float | None = None
    """With it, how often a group is used on average: see `min_diff` and `max_diff`."""
    min_size: int = 1
    """No step before this many groups are ready (only with `samples_per_insert`)."""
    error_buffer: float = 0.0
    """How far uses may deviate from samples_per_insert x inserts, to either side."""
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    """At most so many groups of an environment in one step."""
    keep_steps: int = 0
    """Payloads of spent groups stay for this many steps, to be looked at or archived."""

    @property
    def slots(self) -> int:
        """Groups that may exist at once without any of them outliving max_age (docs/buffer.md has the proof)."""
        return floor((self.max_age + 1) * self.groups_per_step)

    @property
    def age_bound(self) -> int:
        """The hard bound. Slots may be a fraction of a step's groups, ages are whole."""
        return ceil(self.max_age)

    @property
    def steps_between_pushes(self) -> int:
        """At most: a step needs the slots of its groups, and they return only with weights trained on them."""
        return self.slots // self.groups_per_step

    @property
    def min_diff(self) -> float:
        """Uses are taken while samples_per_insert x inserts - uses stays above this ..."""
        return (self.samples_per_insert or 0.0) * self.min_size - self.error_buffer

    @property
    def max_diff(self) -> float:
        """... and tickets are given while it stays below this."""
        return (self.samples_per_insert or 0.0) * self.min_size + self.error_buffer


CommitResult = Literal["stored", "already", "lease_lost", "no_signal", "quarantined"]


class ReplayBuffer(Protocol):
    """Which groups exist, who holds them, which leave next. Every method is one atomic change, safe to repeat."""

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        """Up to `count` tickets; waits at most `wait_s` for the first, then returns an empty list.

        Gives none until a learner has recovered, while no slot is free, or while `version` (what the worker's engine
        holds) is below the live version. Workers that wait are served in turn, each at most an equal share of what is
        free. Each ticket starts with a lease of `Limits.lease_s`.
        """
        ...

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        """Extend the leases; returns the ids that are no longer this worker's: stop working on those."""
        ...

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        """RESERVED -> READY. Idempotent by group id: a retry after a lost reply answers "already".

        `keep=False` says that the group carries no signal: it is counted, dropped, and its slot freed. A group that
        fails validation is quarantined with its reason and its task rolled again.
        """
        ...

    async def abandon(self, worker: str, ticket: str, reason: Drop) -> None:
        """Hand a ticket back. Its task is rolled again, up to `max_attempts` when the reason is "failed", and not at all
        when it is "detached": its environment has left the mix."""
        ...

    # -- the learner's side: every call carries the fence and changes nothing once a newer learner took over ----------
    async def acquire(self, owner: str, limits: Limits, *, after: int = 0) -> int:
        """Become the learner: a fence above `after` and all that this server gave, under a lease that `hold` renews.

        A lease that somebody left behind is waited out; one that is being renewed raises LearnerAlreadyRunning.
        Limits that were changed while the run goes on (`change_limits`) stand above these. No ticket is given before
        `recover`.
        """
        ...

    async def hold(self, fence: int) -> None:
        """Renew the learner's lease. Raises FenceLost."""
        ...

    async def recover(self, fence: int, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        """Settle what the previous learner left: groups taken for steps <= position.step are SPENT, later ones READY.

        `undone` were trained in later steps. Those that were spent, because a checkpoint contained them that is gone, are
        counted and their tasks rolled again. The next step is position.step + 1, or 1.
        """
        ...

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
        """Exactly `num_groups` groups READY -> TAKEN(step), to train weights `version`; or none after `wait_s`.

        Fewer if the next one would exceed `max_tokens`, but at least one. No group older than max_age is ever returned.
        Called again for the same step it returns the same groups. `patient=False` lets stragglers go that were waited
        for too long. Raises ServerRewound when the step before is not the last one that the server knows.
        """
        ...

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        """How likely groups are to be chosen again, relative to 1 (selector "prioritized")."""
        ...

    async def issue(self, fence: int, *, after: int) -> int:
        """The next version number, above `after` and all that were ever issued. Asked again, the same."""
        ...

    async def publish(self, fence: int, record: VersionRecord) -> None:
        """Make a version live. Versions only grow."""
        ...

    async def release(self, fence: int, step: int) -> None:
        """Return the slots of the groups taken for steps <= `step`: weights trained on them are live."""
        ...

    async def position(self, fence: int, step: int) -> BufferPosition:
        """What a checkpoint of `step` must carry."""
        ...

    async def checkpoint(self, fence: int, step: int) -> None:
        """A checkpoint of `step` is durable: TAKEN(<= step) -> SPENT, for good, and released."""
        ...

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        """The oldest ones that are kept, at most `limit`."""
        ...

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        """These spent groups need not be kept any longer."""
        ...

    async def set_max_age(self, fence: int, max_age: float) -> None:
        """Of the limits, for as long as this learner has the run."""
        ...

    async def resign(self, fence: int) -> None:
        """Give up the learner's lease, so that a successor need not wait it out."""
        ...

    # -- anybody ----------------------------------------------------------------------------------------------------
    async def change_limits(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the limits from now on, also for learners to come."""
        ...

    async def mix(self) -> tuple[MixChange, ...]:
        """How the mix of environments was changed while the run goes on, oldest first."""
        ...

    async def change_mix(self, known: str, change: str) -> MixChange | None:
        """Append a change that holds from the first task that nobody was given yet.

        Nothing happens, and None says so, unless `known` is the id of the latest change ("" before the first), and
        while a learner takes over.
        """
        ...

    async def stats(self) -> BufferStats: ...

    async def audit(self) -> Audit: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    reserved: int
    ready: int
    again: int
    """Ready to train another step."""
    taken: int
    kept: int
    """Spent, but their payloads are retained."""
    spent: int
    dropped: Mapping[str, int]
    quarantined: int
    issued: int
    """Tickets ever issued."""
    lost_to_rollback: int
    """Were spent, and are in no checkpoint any more: their tasks are rolled again."""
    expired: int
    """Kept groups whose payloads went before anybody discarded them."""
    slots: int
    slots_used: int
    owed: float
    """samples_per_insert x inserts - uses, of the groups that have not ended."""
    version: int
    """The live version; -1 before the first."""
    fence: int
    bytes: int
    """Of the payloads held."""
    starving: bool
    """Commits wait for memory that only a checkpoint can free."""
    ready_by_version: Mapping[int, int]
    """Groups that never trained, by their oldest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Conservation: every ticket ever issued is in exactly one place."""

    problems: tuple[str, ...]
    stats: BufferStats

    @property
    def is_clean(self) -> bool:
        return not self.problems
