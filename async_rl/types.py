"""The values shared by all roles: from a task to the rollout group that the buffer stores.

    Task ── Turn ── Turn ──▶ Rollout (samples, reward, status) ──▶ RolloutGroup (the siblings of one task)

Arrays are one-dimensional little-endian numpy arrays. Values are never modified after construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Scalar = str | int | float | bool


class StopReason(StrEnum):
    """Why a generation ended."""

    END = "end"
    """The end-of-text token was sampled; it is the last id."""
    STOP = "stop"
    """A stop string or stop token was sampled."""
    LENGTH = "length"
    """`max_tokens` or the model's context limit was reached."""


class Status(StrEnum):
    """The outcome of a rollout. A failed rollout has a `Failure`, never a reward of 0."""

    OK = "ok"
    TRUNCATED = "truncated"
    """Scored; a length limit cut it."""
    FAILED = "failed"
    """No reward exists; `Rollout.failure` says why."""
    MASKED = "masked"
    """Scored and part of the group's baseline, excluded from the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """A JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text as the model wrote it; may be invalid."""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    """system | user | assistant | tool"""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls made by an assistant message."""
    tool_call_id: str = ""
    """In a tool message: the id of the call that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of an environment."""

    key: str
    """Identifies the task; stable across runs and workers."""
    environment: str
    """Name of its environment in the configuration."""
    prompt: str | tuple[Message, ...]
    """Plain text, or messages for the tokenizer's chat template."""
    answer: str = ""
    data: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Further values that the environment needs to play and score the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, stop) of a row were sampled with the weights of `version`."""

    version: int
    start: int
    stop: int


def spans_of(versions: Sequence[int], offset: int = 0) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token; `offset` is the first token's position in its row."""
    changes = np.flatnonzero(np.diff(versions)) + 1
    return tuple(
        VersionSpan(version=versions[start], start=offset + start, stop=offset + stop)
        for start, stop in pairwise([0, *changes.tolist(), len(versions)])
        if start < stop
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The result of one generation. `token_ids` are the sampled tokens; `text` is for reading and scoring only."""

    token_ids: Int32s
    logprobs: Float32s
    """Log-probability of each sampled token under the distribution it was sampled from, including temperature."""
    versions: tuple[VersionSpan, ...]
    """Positions are relative to the first generated token."""
    stop_reason: StopReason
    text: str
    queued_s: float = 0.0
    """Seconds until the step that sampled its first token; 0: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation and the environment's answer to it (empty after the last)."""

    completion: Completion
    observation: str = ""

    @property
    def text(self) -> str:
        return self.completion.text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A token row: prompts, sampled tokens and observations in order. Only sampled tokens are trained."""

    token_ids: Int32s
    loss_mask: Mask
    """1 where the token was sampled."""
    logprobs: Float32s
    """0 for tokens that were not sampled."""
    versions: tuple[VersionSpan, ...]
    """Spans that cover exactly the sampled tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Where and why an episode failed."""

    boundary: str
    """task | inference | environment | reward | deadline"""
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One scored episode of a task."""

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

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, prompts included."""
        return sum(map(len, self.samples))


class EpisodeSpan(NamedTuple):
    """What an episode did for a while, in seconds since its group's ticket was reserved."""

    stage: str
    """task | queue | inference | environment | reward: `queue` waits for the engine, `inference` is one generation."""
    sibling: int
    """Number of the episode within the group; -1: all siblings together."""
    start_s: float
    stop_s: float
    oldest_version: int = -1
    """Oldest version that sampled the generation; -1 where nothing was sampled."""
    newest_version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """When a group was rolled out, by the clock of its worker."""

    reserved_at: float
    """When its ticket was reserved, in seconds since 1970."""
    seconds: float
    """From there until its last episode was scored, by a monotonic clock."""
    spans: tuple[EpisodeSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """The rollouts of one task: the unit that the buffer stores."""

    id: str
    """The id of its ticket."""
    task: Task
    rollouts: tuple[Rollout, ...]
    worker: str
    times: GroupTimes | None = None
    """None: not measured."""

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
        """Tokens of all rows, prompts included."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    def _versions(self) -> Iterable[int]:
        return (span.version for rollout in self.rollouts for sample in rollout.samples for span in sample.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Permission to roll out one group."""

    id: str
    task_index: int
    """Index into the run's stream of tasks."""
    version: int
    """The live version when the ticket was issued, a lower bound of the versions of the group's tokens."""
    attempt: int
    """1 for the task's first ticket, one more for each ticket that ended without a group."""
    mix: str = ""
    """Id of the latest change of the environment mix when the ticket was issued; the mix maps the index to a task."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenGroup:
    """A group as the learner receives it, with the versions that determine its age."""

    group: RolloutGroup
    version_at_commit: int
    version_at_take: int
    """Version of the weights that the group will train."""
    task_index: int = 0
    attempt: int = 1
    """The attempt of its ticket."""
    payload: bytes | memoryview = b""
    """The group as the buffer held it, of which the group's arrays are views; empty: the buffer holds no bytes."""

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
    """A version of the weights, as published."""

    version: int
    timeline: str
    """Identifies one life of the learner; every resume starts a new timeline."""
    step: int
    """Optimizer steps that produced these weights."""
    digest: str
    """Digest of the weights as pushed."""


class MixChange(NamedTuple):
    """One change of the environment mix, made while the run goes on."""

    at: int
    """The first task index that it applies to."""
    id: str
    """Digest of this change and all earlier ones; equal ids mean equal logs up to here."""
    change: str
    """JSON of a change, see async_rl/board/environment_mix.py."""


class PendingTask(NamedTuple):
    """A task that waits for another ticket."""

    task_index: int
    attempt: int
    """The attempt of its next ticket."""
    failures: int
    """Failed tickets so far, bounded by `Limits.max_attempts`."""


class UndoneGroup(NamedTuple):
    """A group that was trained, by the journal, but that the weights resumed from do not contain."""

    id: str
    task_index: int
    attempt: int


class OutstandingTicket(NamedTuple):
    """A ticket that has not ended, with what is needed to repeat its task."""

    number: int
    task_index: int
    attempt: int
    failures: int
    steps: tuple[int, ...] = ()
    """With replay: steps up to the checkpoint that its group has trained."""

    @property
    def again(self) -> PendingTask:
        return PendingTask(task_index=self.task_index, attempt=self.attempt + 1, failures=self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPosition:
    """The buffer's part of a checkpoint: enough to resume exactly, even with an empty or older Redis."""

    step: int
    """Groups taken for steps up to this one are spent."""
    version: int
    """The highest version ever issued."""
    next_ticket: int
    next_task: int
    untrained: int = 0
    """Tasks that ended untrained: no signal, failed too often, or their environment was detached."""
    redo: tuple[PendingTask, ...] = ()
    """Tasks that wait for another ticket."""
    outstanding: tuple[OutstandingTicket, ...] = ()
    """Tickets below `next_ticket` that had not ended; all others are spent or dropped."""
    mix: tuple[MixChange, ...] = ()
    """Changes of the environment mix so far."""
    mark: str = field(default="", compare=False)
    """A random mark written into the buffer with this position; a buffer without it has lost writes or is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentGroup:
    """A group contained in a checkpoint whose payload the buffer still holds."""

    id: str
    step: int
    """The last step that it trained."""
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The result of `ReplayBuffer.recover`."""

    version: int
    """The highest version ever issued."""
    returned: int
    """Groups taken after the checkpoint and made ready again."""
    spent: int
    """Groups that the checkpoint contains."""
    lost: int = 0
    """Spent groups that no remaining checkpoint contains; their tasks are rolled out again."""
