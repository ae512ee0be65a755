"""The seams: what each part may expect of the others. A concrete class is named only in a composition root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from async_rl.types import (
    BufferPosition,
    Completion,
    Message,
    Recovery,
    Rollout,
    RolloutGroup,
    TakenGroup,
    Task,
    Ticket,
    VersionRecord,
)

Drop = Literal["stale", "lease_lost", "no_signal", "failed", "abandoned"]
"""Why a ticket ended without being trained on. Every drop is counted under its reason."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...


class Tokenizer(Protocol):
    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a whole prompt, special tokens included, ready to be continued by the model."""
        ...

    def render_reply(self, message: Message, *, after_end: bool) -> list[int]:
        """The ids that stand between a sampled answer in a conversation and the next one: what the chat template puts
        around `message`. `after_end` says that the answer already closed with the end token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationArgs:
    """Unset (None) means the run's default. What a backend cannot do it refuses by name."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None

    def over(self, defaults: GenerationArgs) -> GenerationArgs:
        """These arguments, with `defaults` where nothing was set."""
        chosen = {
            name: own if (own := getattr(self, name)) is not None else getattr(defaults, name)
            for name in self.__dataclass_fields__
        }
        return GenerationArgs(**chosen)


class ContextOverflow(ValueError):
    """The prompt leaves no room for an answer in the model's context."""


@runtime_checkable
class InferenceInterface(Protocol):
    """All that an agent sees of a model."""

    tokenizer: Tokenizer

    async def generate(self, prompt: str | Sequence[Message] | Sequence[int], args: GenerationArgs | None = None) -> Completion:
        """Sample one continuation. Text and messages are rendered once; token ids are taken as they are.

        Waits while the engine is busy or holds no weights yet. Cancelling it frees the engine's place at once.
        Raises ContextOverflow when the prompt is too long to be answered.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What an agent may know about the episode it plays."""

    ticket: Ticket
    sibling: int
    """0 .. group_size - 1."""
    seed: int
    """Differs between siblings, the same whenever this attempt is played again."""


class Agent(Protocol):
    """Plays episodes of one environment: this is what people attach."""

    def task(self, index: int) -> Task:
        """The index-th task of an endless stream. Pure: the same index always gives the same task."""
        ...

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play one episode and score it. Whatever it raises becomes a failed rollout; cancelling it ends the episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that pace the fleet. They live in the buffer, so that they hold for everybody at once."""

    max_age: int
    groups_per_step: int
    lease_s: float
    """How long a ticket lives without being renewed."""
    max_attempts: int
    """A task whose tickets failed this often is not tried again."""
    overtaken: Literal["wait", "drop"]
    """What `take` does about a straggler that would become too old: wait for it, or let it go."""

    @property
    def slots(self) -> int:
        """Groups that may exist at once without any of them outliving max_age (docs/buffer.md has the proof)."""
        return (self.max_age + 1) * self.groups_per_step


CommitResult = Literal["stored", "already", "lease_lost", "no_signal", "quarantined"]


class ReplayBuffer(Protocol):
    """Which groups exist, who holds them, which leave next. Every method is one atomic change, safe to repeat."""

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        """Up to `count` tickets; waits at most `wait_s` for the first, then returns an empty list.

        Gives none while no learner has set the limits, no slot is free, or `version` (what the worker's engine
        holds) is below the live version. Each ticket starts with a lease of `Limits.lease_s`.
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
        """Hand a ticket back. Its task is rolled again, up to `max_attempts` when the reason is "failed"."""
        ...

    # -- the learner's side: every call carries the fence and changes nothing once a newer learner took over ----------
    async def acquire(self, owner: str, limits: Limits) -> int:
        """Become the learner: a new fence number, under a lease that `hold` renews.

        A lease that somebody left behind is waited out; one that is being renewed raises LearnerAlreadyRunning.
        """
        ...

    async def hold(self, fence: int) -> None:
        """Renew the learner's lease. Raises FenceLost."""
        ...

    async def recover(self, fence: int, position: BufferPosition | None) -> Recovery:
        """Settle what the previous learner left: groups taken for steps <= position.step are SPENT, later ones READY."""
        ...

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
        """Exactly `num_groups` groups READY -> TAKEN(step), to train weights `version`; or none after `wait_s`.

        No group older than max_age is ever returned. Called again for the same step it returns the same groups.
        `overtaken` stands in for `Limits.overtaken` in this call: "drop" lets stragglers go that were waited for too long.
        """
        ...

    async def issue(self, fence: int) -> int:
        """The next version number. Never the same twice."""
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
        """A checkpoint of `step` is durable: TAKEN(<= step) -> SPENT, for good.

        Comes after `release(step)`: a spent group holds no slot.
        """
        ...

    async def resign(self, fence: int) -> None:
        """Give up the learner's lease, so that a successor need not wait it out."""
        ...

    # -- anybody ----------------------------------------------------------------------------------------------------
    async def stats(self) -> BufferStats: ...

    async def audit(self) -> Audit: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    reserved: int
    ready: int
    taken: int
    spent: int
    dropped: Mapping[str, int]
    quarantined: int
    issued: int
    """Tickets ever issued."""
    slots: int
    slots_used: int
    version: int
    """The live version; -1 before the first."""
    fence: int
    bytes: int
    """Of the payloads held."""
    ready_by_version: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Conservation: every ticket ever issued is in exactly one place."""

    problems: tuple[str, ...]
    stats: BufferStats

    @property
    def is_clean(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout worker as the weight wire sees it."""

    id: str
    host: str
    version: int
    """What its engine serves; -1 before the first push."""
    device: str
    gpu: str = ""
    """Identifies the GPU behind `device` among all machines; empty on a CPU."""


class Board(Protocol):
    """Small shared facts of a run: what fleets must agree on, who is there, what is live. Redis behind it."""

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        """Write the facts if this is the first to come, else compare. Raises FleetMismatch naming what differs."""
        ...

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Be listed for `ttl_s`. Repeating it keeps the listing alive and updates it."""
        ...

    async def leave(self, member_id: str) -> None: ...

    async def members(self) -> list[Member]:
        """Everybody whose announcement has not expired, by id."""
        ...

    async def live_version(self) -> VersionRecord | None: ...

    async def versions(self) -> list[VersionRecord]: ...

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        """Append a message to a topic's log (bounded; only recent messages are kept)."""
        ...

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Messages after a position ("0" = the oldest kept, "$" = only later ones), with their positions.

        Waits at most `wait_s` for the first.
        """
        ...


class MetricsSink(Protocol):
    """Where metrics go. `log` never blocks the step; `close` writes what is left."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
