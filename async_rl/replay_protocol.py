"""`ReplayBuffer`, the interface of the replay buffer, and `Limits`, the numbers that pace workers and learner."""

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
"""Why a ticket ended untrained. Drops are counted by reason."""

Selector = Literal["windowed_fifo", "fifo", "freshest", "uniform", "prioritized"]
"""Which ready groups are taken first. The two fifo selectors take the oldest, unused groups before reused ones;
`windowed_fifo` also waits for unfinished groups that would otherwise become too old.
"""


ROUNDING = 1e-6
"""A pace that was computed as groups / groups_per_step stands for that many groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that pace workers and learner. Stored in the buffer, so that all processes use the same ones."""

    max_age: float
    groups_per_step: int
    lease_s: float
    """Seconds until a ticket that is not renewed expires."""
    max_attempts: int
    """A task is dropped after this many failed tickets."""
    selector: Selector = "windowed_fifo"
    max_uses: int = 1
    """Maximum number of steps that train one group."""
    samples_per_insert: float | None = None
    """Target average number of uses of a group, see `min_diff` and `max_diff`; None: no target."""
    min_size: int = 1
    """With `samples_per_insert`: groups that must be ready before the first step."""
    error_buffer: float = 0.0
    """Allowed deviation of uses from samples_per_insert x inserts, in either direction."""
    quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    """Maximum groups per step, by environment."""
    keep_steps: int = 0
    """Steps that payloads of spent groups are kept, for inspection or the archive."""
    pace: float | None = None
    """Steps' worth of groups that may exist at once, below what max_age allows; None: all that it allows."""

    @property
    def max_slots(self) -> int:
        """Groups that may exist at once so that none exceeds max_age (proof in docs/buffer.md)."""
        return floor((self.max_age + 1) * self.groups_per_step)

    @property
    def slots(self) -> int:
        """Groups that may exist at once: `max_slots`, or fewer at a lower pace."""
        if self.pace is None:
            return self.max_slots
        return min(self.max_slots, floor(self.pace * self.groups_per_step + ROUNDING))

    @property
    def age_bound(self) -> int:
        """Maximum age as a whole number; `max_age` may be a fraction."""
        return ceil(self.max_age)

    @property
    def steps_between_pushes(self) -> int:
        """Upper bound: the slots of a step's groups return only when weights trained on them are live."""
        return self.slots // self.groups_per_step

    @property
    def min_diff(self) -> float:
        """Groups are taken while samples_per_insert x inserts - uses stays above this."""
        return (self.samples_per_insert or 0.0) * self.min_size - self.error_buffer

    @property
    def max_diff(self) -> float:
        """Tickets are issued while samples_per_insert x inserts - uses stays below this."""
        return (self.samples_per_insert or 0.0) * self.min_size + self.error_buffer


CommitResult = Literal["stored", "already", "lease_lost", "no_signal", "quarantined"]


class ReplayBuffer(Protocol):
    """Holds tickets and groups between workers and learner. Every method is one atomic change and safe to repeat."""

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        """Return up to `count` tickets. Blocks for at most `wait_s` until there is one, then returns an empty list.

        Issues none before a learner has recovered, while no slot is free, or while `version` (that of the worker's engine)
        is below the live version. Waiting workers are served in turn, each with at most an equal share of the free slots.
        Each ticket starts with a lease of `Limits.lease_s`.
        """
        ...

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        """Extend the leases. Returns the ids that are no longer this worker's; it must stop working on them."""
        ...

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        """RESERVED -> READY. Idempotent by group id: a repetition returns "already".

        `keep=False`: the group has no signal; it is counted and dropped, and its slot freed. A group that fails validation
        is quarantined with the reason and its task rolled out again.
        """
        ...

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, tokens: int = 0) -> None:
        """Return a ticket, for which `tokens` were generated. Its task is rolled out again; up to `max_attempts` times if the
        reason is "failed", not at all if it is "detached" (its environment has left the mix)."""
        ...

    # -- the learner's side: every call carries the fence and changes nothing once a newer learner took over ----------
    async def acquire(self, owner: str, limits: Limits, *, after: int = 0, succeeds: str = "") -> int:
        """Become the learner. Returns a fence above `after` and all earlier ones, under a lease that `hold` renews.

        Waits until an abandoned lease expires, unless it is that of `succeeds`, an owner known to be dead; raises
        LearnerAlreadyRunning if it is being renewed. Limits changed at run time (`change_limits`) override `limits`. No ticket
        is issued before `recover`.
        """
        ...

    async def hold(self, fence: int) -> None:
        """Renew the learner's lease. Raises FenceLost."""
        ...

    async def recover(self, fence: int, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        """Settle the groups of the previous learner: those taken for steps <= position.step become SPENT, later ones READY.

        `undone` are groups trained in later steps. Those of them that were spent by a checkpoint that is gone are counted
        and their tasks rolled out again. The next step is position.step + 1, or 1 without a position.
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
        """READY -> TAKEN(step): exactly `num_groups` groups to train weights `version`, or none after `wait_s`.

        Returns fewer if the next one would exceed `max_tokens`, but at least one; never a group older than max_age. A
        repeated call for the same step returns the same groups. `patient=False`: do not wait for unfinished groups any more
        (windowed_fifo). Raises ServerRewound if the previous step is not the last one that the server knows.
        """
        ...

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        """Set the weights with which groups are drawn again, 1 by default (selector "prioritized")."""
        ...

    async def issue(self, fence: int, *, after: int) -> int:
        """Return the next version number, above `after` and all issued ones. A repeated call returns the same one."""
        ...

    async def publish(self, fence: int, record: VersionRecord) -> None:
        """Make a version live. It must be above the live one."""
        ...

    async def release(self, fence: int, step: int) -> None:
        """Free the slots of groups taken for steps <= `step`, because weights trained on them are live."""
        ...

    async def position(self, fence: int, step: int) -> BufferPosition:
        """Return what a checkpoint of `step` must contain."""
        ...

    async def checkpoint(self, fence: int, step: int) -> None:
        """TAKEN(<= step) -> SPENT and released, because a checkpoint of `step` is durable."""
        ...

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        """The oldest retained groups, at most `limit`."""
        ...

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        """Delete the payloads of these spent groups."""
        ...

    async def set_limit(self, fence: int, name: Literal["max_age", "pace"], value: float) -> None:
        """Change a limit for as long as this learner holds the run. Leaves a pace that operators set as it is."""
        ...

    async def resign(self, fence: int) -> None:
        """Release the learner's lease, so that a successor does not wait for it to expire."""
        ...

    # -- any process ------------------------------------------------------------------------------------------------
    async def change_limits(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the limits, also for later learners. `pace` may be "auto": the learner decides it again."""
        ...

    async def mix(self) -> tuple[MixChange, ...]:
        """The changes of the environment mix, oldest first."""
        ...

    async def change_mix(self, known: str, change: str) -> MixChange | None:
        """Append a change that applies from the first unassigned task on.

        Returns None and changes nothing if `known` is not the id of the latest change ("" before the first), or while a
        learner takes over.
        """
        ...

    async def stats(self) -> BufferStats: ...

    async def audit(self) -> Audit: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    reserved: int
    ready: int
    again: int
    """Groups ready for another use."""
    taken: int
    kept: int
    """Spent groups whose payloads are retained."""
    spent: int
    dropped: Mapping[str, int]
    quarantined: int
    issued: int
    """Tickets ever issued."""
    lost_to_rollback: int
    """Spent groups that no remaining checkpoint contains; their tasks are rolled out again."""
    expired: int
    """Retained groups whose payloads expired before they were discarded."""
    slots: int
    slots_used: int
    owed: float
    """samples_per_insert x inserts - uses, over groups that have not ended."""
    version: int
    """The live version; -1 before the first."""
    fence: int
    bytes: int
    """Size of the stored payloads."""
    starving: bool
    """Commits wait for memory that only a checkpoint can free."""
    ready_by_version: Mapping[int, int]
    """Number of unused ready groups by their oldest version."""
    tokens: Mapping[str, int]
    """Tokens of ended rollouts, prompts included, since the run began: `generated`, and by fate: `trained` (spent),
    `quarantined` or the reason of a drop. Those of a worker that lost its lease or was killed are unknown."""

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of groups that are ready, or trained and in no checkpoint yet."""
        return 2 * self.tokens.get("generated", 0) - sum(self.tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of the conservation check: every ticket ever issued is in exactly one state."""

    problems: tuple[str, ...]
    stats: BufferStats

    @property
    def is_clean(self) -> bool:
        return not self.problems
