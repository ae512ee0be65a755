"""The values everybody speaks: what a rollout is, from its task to the group the buffer stores.

    Task ── Turn ── Turn ──▶ Rollout (samples, reward, status) ──▶ RolloutGroup (the siblings of one task)

Arrays are numpy, little-endian, one dimension; a value is never changed after it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Scalar = str | int | float | bool


class StopReason(StrEnum):
    """Why a generation ended."""

    END = "end"  # the end-of-text token was sampled; it is the last id
    STOP = "stop"  # a stop string or stop token appeared
    LENGTH = "length"  # max_tokens, or the model's context, ran out


class Status(StrEnum):
    """What became of a rollout. A failed one is a value with a reason, never a reward of 0."""

    OK = "ok"
    TRUNCATED = "truncated"  # scored, but cut by a length limit
    FAILED = "failed"  # no reward exists; `Rollout.failure` says why
    MASKED = "masked"  # scored and part of the group's baseline, kept out of the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """A JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text, as the model wrote it: it need not be valid."""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    """system | user | assistant | tool"""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str = ""
    """Which call a tool's message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem."""

    key: str
    """Stays the same across runs and fleets."""
    environment: str
    """The name under which its environment stands in the configuration."""
    prompt: str | tuple[Message, ...]
    """Plain text, or a conversation for the tokenizer's chat template."""
    answer: str = ""
    data: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Whatever else the environment needs to play and score the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, stop) of a row were sampled by weights `version`."""

    version: int
    start: int
    stop: int


def spans_of(versions: Sequence[int], offset: int = 0) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token; `offset` is where the first token stands in its row."""
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions, start=offset):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, stop=position + 1)
        else:
            spans.append(VersionSpan(version=version, start=position, stop=position + 1))
    return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What one generation returned. Token ids are what was sampled; `text` is only for reading and scoring."""

    token_ids: Int32s
    logprobs: Float32s
    """Of each sampled token under the distribution that it was drawn from (temperature included)."""
    versions: tuple[VersionSpan, ...]
    """Positions count from the first generated token."""
    stop_reason: StopReason
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation, plus what the environment answered (empty after the last)."""

    completion: Completion
    observation: str = ""

    @property
    def text(self) -> str:
        return self.completion.text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """An append-only token row: what the model saw and said, in order. Only sampled tokens are trained on."""

    token_ids: Int32s
    loss_mask: Mask
    """1 where the token was sampled."""
    logprobs: Float32s
    """0 where not sampled."""
    versions: tuple[VersionSpan, ...]
    """Cover exactly the sampled tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Where and why an episode broke."""

    boundary: str
    """task | inference | environment | reward | deadline"""
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One episode on one task, scored."""

    samples: tuple[Sample, ...]
    reward: float
    """Meaningless when `status` is failed."""
    status: Status
    failure: Failure | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    conversation: tuple[Message, ...] = ()

    @property
    def num_sampled(self) -> int:
        return sum(sample.num_sampled for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """The sibling rollouts of one task: the unit that the buffer stores."""

    id: str
    """The id of the ticket it was rolled out under."""
    task: Task
    rollouts: tuple[Rollout, ...]
    worker: str

    @property
    def oldest_version(self) -> int:
        return min(self._versions())

    @property
    def newest_version(self) -> int:
        return max(self._versions())

    @property
    def num_sampled(self) -> int:
        return sum(rollout.num_sampled for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """What the group takes of a packed batch."""
        return sum(len(sample) for rollout in self.rollouts for sample in rollout.samples)

    def _versions(self) -> Iterable[int]:
        return (span.version for rollout in self.rollouts for sample in rollout.samples for span in sample.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Permission to roll out one group."""

    id: str
    task_index: int
    """Which task of the stream: the environment turns it into a Task."""
    version: int
    """The live version when the ticket was issued: no token of the group can be older."""
    attempt: int
    """1 at first; more when the task's earlier tickets came to nothing."""
    mix: str = ""
    """The latest change of the mix of environments when the ticket was issued: under it the index becomes a task."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenGroup:
    """A group as the learner receives it, with the versions that its age is made of."""

    group: RolloutGroup
    version_at_commit: int
    version_at_take: int
    """The version of the weights that the group will train."""
    task_index: int = 0
    attempt: int = 1
    """Of its ticket, as its task's index."""

    @property
    def age(self) -> int:
        return self.version_at_take - self.group.oldest_version

    @property
    def age_in_flight(self) -> int:
        return self.version_at_commit - self.group.oldest_version

    @property
    def age_in_queue(self) -> int:
        return self.version_at_take - self.version_at_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """What a version is: one row of the table version → weights."""

    version: int
    timeline: str
    """Names the learner's life since its last resume; a resumed learner starts another."""
    step: int
    """Optimizer steps behind these weights."""
    digest: str
    """Of the weights as pushed."""


class MixChange(NamedTuple):
    """One change of the mix of environments, made while the run goes on."""

    at: int
    """It holds from this task index on."""
    id: str
    """Of this change and all before it: who knows the id knows the whole log up to here."""
    change: str
    """JSON, see async_rl/board/environment_mix.py."""


class PendingTask(NamedTuple):
    """A task that waits to be rolled again."""

    task_index: int
    attempt: int
    """Of its next ticket."""
    failures: int
    """How many of its tickets failed; `Limits.max_attempts` bounds it."""


class UndoneGroup(NamedTuple):
    """A group whose training no weights remember any more, by the journal."""

    id: str
    task_index: int
    attempt: int


class OutstandingTicket(NamedTuple):
    """A ticket that has not ended, with what is needed to roll its task again."""

    number: int
    task_index: int
    attempt: int
    failures: int
    steps: tuple[int, ...] = ()
    """Which of the checkpoint's steps its group has trained: where a group may train several."""

    @property
    def again(self) -> PendingTask:
        return PendingTask(task_index=self.task_index, attempt=self.attempt + 1, failures=self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPosition:
    """The buffer's part of a checkpoint: enough to go on exactly, even beside an empty or an older Redis."""

    step: int
    """Groups taken for steps up to this one are spent."""
    version: int
    """The highest version ever issued."""
    next_ticket: int
    next_task: int
    untrained: int = 0
    """Tasks that ended without being trained: no signal, failed too often, or of an environment that was detached."""
    redo: tuple[PendingTask, ...] = ()
    """Tasks whose tickets came to nothing and that wait for another."""
    outstanding: tuple[OutstandingTicket, ...] = ()
    """Tickets below `next_ticket` that had not ended: every other one is spent or dropped for good."""
    mix: tuple[MixChange, ...] = ()
    """How the mix of environments was changed until then."""
    mark: str = field(default="", compare=False)
    """Left in the buffer when this was read: a buffer without it has lost what came before, or is another one."""

    def __post_init__(self) -> None:
        # A checkpoint's JSON turns tuples into lists.
        object.__setattr__(self, "redo", tuple(PendingTask(*pending) for pending in self.redo))
        object.__setattr__(self, "outstanding", tuple(_outstanding(*ticket) for ticket in self.outstanding))
        object.__setattr__(self, "mix", tuple(MixChange(*change) for change in self.mix))


def _outstanding(number: int, task_index: int, attempt: int, failures: int, steps: Sequence[int] = ()) -> OutstandingTicket:
    return OutstandingTicket(number, task_index, attempt, failures, tuple(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentGroup:
    """A group whose training is durable, as the buffer still holds it."""

    id: str
    step: int
    """The last one that it trained."""
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a learner finds when it takes over."""

    version: int
    """The highest version ever issued; the next one is above it."""
    returned: int
    """Groups taken after the checkpoint, ready again."""
    spent: int
    """Groups that the checkpoint already contains."""
    lost: int = 0
    """Groups that were spent and are in no checkpoint any more: their tasks wait to be rolled again."""
