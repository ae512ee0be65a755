"""One recorded group: its rollouts as the buffer held them, or the heads of those that were dropped, and its times.

A record in the data file is a frame (magic, lengths), a JSON object (`GroupFacts`) and the group as bytes (docs/archive.md).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from async_rl.payloads.codec import BadPayload, decode
from async_rl.recording.events import Event, compact_json
from async_rl.recording.rows import GroupRow
from async_rl.types import Message, Rollout, RolloutGroup, Status, Task

HEAD_CHARACTERS = 2000
"""Characters kept of each text of a dropped group, and of all messages of one of its rollouts together."""
HEAD_ROLLOUTS = 64
"""Rollouts kept of a dropped group."""

_FRAME = struct.Struct("<4sII")
_MAGIC = b"ARLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What is known of a group beside its content. Times are on the learner's clock, in seconds since 1970; 0: unknown."""

    fate: str
    """`trained`, or the reason of its drop."""
    task_index: int = 0
    attempt: int = 1
    step: int | None = None
    """The step that it first trained."""
    version_at_take: int | None = None
    """The version of the weights that it trained."""
    version_at_commit: int | None = None
    """The live version when it was committed."""
    reserved_at: float = 0.0
    ready_at: float = 0.0
    """When its last episode was scored, and it was committed or dropped."""
    taken_at: float = 0.0
    trained_from: float = 0.0
    trained_at: float = 0.0
    is_head: bool = False
    """The texts are cut to `HEAD_CHARACTERS`, and there are no tokens."""
    counts: tuple[tuple[int, int], ...] = ()
    """Sampled tokens and tokens of each rollout; only a head has them."""
    advantages: tuple[float | None, ...] = ()
    """One for each rollout, in the step that it first trained; None where it is not trained. Empty: the group was dropped, or
    its objective has no single advantage per rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedGroup:
    """A group, as `Recording.group` returns it."""

    facts: GroupFacts
    content: RolloutGroup
    """Task, rollouts and worker. A dropped group has the heads of texts and no samples."""

    @property
    def id(self) -> str:
        return self.content.id

    @property
    def task(self) -> Task:
        return self.content.task

    @property
    def age(self) -> int | None:
        """Its age in the step that it first trained; None: dropped."""
        taken = self.facts.version_at_take
        return None if taken is None else taken - self.content.oldest_version

    @property
    def rollouts(self) -> tuple[RecordedRollout, ...]:
        """The siblings."""
        return tuple(RecordedRollout(self, sibling) for sibling in range(len(self.content.rollouts)))


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    """A rollout of a recorded group, as `Recording.rollout` returns it."""

    group: RecordedGroup
    sibling: int

    @property
    def id(self) -> str:
        return f"{self.group.id}/{self.sibling}"

    @property
    def content(self) -> Rollout:
        """Conversation, reward and its parts, status, failure, and per sample: token ids, loss mask, log-probabilities and the
        version of each sampled token."""
        return self.group.content.rollouts[self.sibling]

    @property
    def reward(self) -> float | None:
        """None: it failed."""
        return None if self.content.status is Status.FAILED else self.content.reward

    @property
    def advantage(self) -> float | None:
        """None: it has none, or none is recorded (`GroupFacts.advantages`)."""
        advantages = self.group.facts.advantages
        return advantages[self.sibling] if advantages else None

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, also of a head."""
        counts = self.group.facts.counts
        return counts[self.sibling][0] if counts else self.content.num_sampled

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompts included, also of a head."""
        counts = self.group.facts.counts
        return counts[self.sibling][1] if counts else self.content.num_tokens

    @property
    def texts(self) -> Iterator[str]:
        """The prompt and the messages of the conversation."""
        prompt = self.group.task.prompt
        yield from [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        yield from (message.content for message in self.content.conversation)


def head_of(group: RolloutGroup) -> tuple[RolloutGroup, tuple[tuple[int, int], ...]]:
    """Return a group with the heads of its texts and no tokens, and the sampled tokens and tokens of each rollout."""
    task, kept = group.task, group.rollouts[:HEAD_ROLLOUTS]
    prompt = task.prompt[:HEAD_CHARACTERS] if isinstance(task.prompt, str) else _head(task.prompt)
    rollouts = [replace(rollout, samples=(), conversation=_head(rollout.conversation)) for rollout in kept]
    short = replace(task, prompt=prompt, answer=task.answer[:HEAD_CHARACTERS], data={})
    counts = tuple((rollout.num_sampled, rollout.num_tokens) for rollout in kept)
    return replace(group, task=short, rollouts=tuple(rollouts)), counts


def _head(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    left, kept = HEAD_CHARACTERS, list[Message]()
    for message in messages:
        if left <= 0:
            break
        kept.append(Message(role=message.role, content=message.content[:left]))
        left -= max(1, len(message.content))
    return tuple(kept)


_FACTS = tuple(each.name for each in fields(GroupFacts))


# -- in a file ------------------------------------------------------------------------------------------------------
def write_record(facts: GroupFacts, payload: bytes | memoryview) -> bytes:
    text = compact_json({name: getattr(facts, name) for name in _FACTS})
    return b"".join((_FRAME.pack(_MAGIC, len(text), len(payload)), text, payload))


def read_record(record: bytes) -> RecordedGroup | None:
    """Return the group of a record; None if it is damaged."""
    try:
        magic, length, size = _FRAME.unpack_from(record)
        text, payload = record[_FRAME.size : _FRAME.size + length], record[_FRAME.size + length :]
        if magic != _MAGIC or size != len(payload):
            return None
        facts = cast("dict[str, Any]", json.loads(text))
        counts = tuple((sampled, tokens) for sampled, tokens in facts.pop("counts"))
        advantages = tuple(facts.pop("advantages", ()))
        return RecordedGroup(facts=GroupFacts(**facts, counts=counts, advantages=advantages), content=decode(payload))
    except (BadPayload, ValueError, TypeError, LookupError, struct.error):
        return None


@dataclass(frozen=True, slots=True)
class GroupMeasures:
    """What the index and the event of a group need, from one pass over its samples."""

    counts: Sequence[tuple[int, int]]
    """Sampled tokens and tokens of each rollout."""
    oldest_version: int | None
    """None: no token was sampled, or the group is a head."""
    newest_version: int | None


def measure(facts: GroupFacts, group: RolloutGroup) -> GroupMeasures:
    counts, versions = list[tuple[int, int]](), set[int]()
    for rollout in group.rollouts:
        sampled = tokens = 0
        for sample in rollout.samples:
            tokens += len(sample.token_ids)
            for span in sample.versions:
                versions.add(span.version)
                sampled += span.stop - span.start
        counts.append((sampled, tokens))
    return GroupMeasures(facts.counts if facts.is_head else counts, min(versions, default=None), max(versions, default=None))


def row_of(
    facts: GroupFacts, group: RolloutGroup, measures: GroupMeasures, record: bytes, *, at: float, offset: int
) -> GroupRow:
    """Return the index's row of a record."""
    taken, oldest = facts.version_at_take, measures.oldest_version
    advantages = facts.advantages if facts.advantages else (None,) * len(group.rollouts)
    return GroupRow(
        id=group.id,
        at=at,
        fate=facts.fate,
        step=facts.step,
        age=taken - oldest if taken is not None and oldest is not None else None,
        environment=group.task.environment,
        task=group.task.key,
        worker=group.worker,
        attempt=facts.attempt,
        offset=offset,
        length=len(record),
        checksum=zlib.crc32(record),
        numbers=tuple(
            [
                (
                    rollout.reward if rollout.status is not Status.FAILED else None,
                    rollout.status.value,
                    *count,
                    int(rollout.metrics.get("turns", 1)),
                    None if advantage is None else round(advantage, 6),
                    _seconds(group, sibling),
                )
                for sibling, (rollout, count, advantage) in enumerate(
                    zip(group.rollouts, measures.counts, advantages, strict=True)
                )
            ]
        ),
    )


def _seconds(group: RolloutGroup, sibling: int) -> float | None:
    """Return how long an episode took, from the task to the score."""
    spans = [span for span in group.times.spans if span.sibling in (-1, sibling)] if group.times is not None else []
    return round(max(span.stop_s for span in spans) - min(span.start_s for span in spans), 4) if spans else None


def group_event(facts: GroupFacts, group: RolloutGroup, measures: GroupMeasures, process: str, *, with_spans: bool) -> Event:
    """Return the event of a group's rolling out. `with_spans`: also what its episodes did, which its record has too."""
    fields: dict[str, Any] = {
        "group": group.id,
        "task": group.task.key,
        "environment": group.task.environment,
        "worker": group.worker,
        "task_index": facts.task_index,
        "attempt": facts.attempt,
        "oldest_version": measures.oldest_version,
        "newest_version": measures.newest_version,
        "rollouts": len(group.rollouts),
        "sampled": sum(sampled for sampled, _ in measures.counts),
        "fate": facts.fate,
    }
    if with_spans and group.times is not None:
        fields["spans"] = [list(span) for span in group.times.spans]
    seconds = facts.ready_at - facts.reserved_at
    return Event(kind="group", at=facts.reserved_at, seconds=seconds, process=process, fields=fields)
