"""The index of the recorded rollouts: a line per group, from which a browser filters without opening a group."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from async_rl.recording.events import compact_json

Numbers = tuple[float | None, str, int, int, int, float | None, float | None]
TRAINED = "trained"
"""The fate of a group that trained a step; every other fate is the reason of a drop."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """What the index says about a rollout."""

    group: GroupRow
    sibling: int
    reward: float | None
    """None: it failed."""
    status: str
    """ok | truncated | failed | masked"""
    sampled: int
    """Number of sampled tokens."""
    tokens: int
    """Number of tokens, prompts and observations included."""
    turns: int
    """Number of answers."""
    advantage: float | None
    """None: it has none, or none is recorded."""
    seconds: float | None
    """From the task to the score; None: it is not recorded."""

    @property
    def id(self) -> str:
        """GROUP/SIBLING, the argument of `Recording.rollout`."""
        return f"{self.group.id}/{self.sibling}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """What the index says about a group."""

    id: str
    """The id of its ticket."""
    at: float
    """When it was recorded, in seconds since 1970 on the learner's clock."""
    fate: str
    """`trained`, or the reason why it was dropped: no_signal, stale, failed, abandoned, detached, lease_lost,
    quarantined."""
    step: int | None
    """The step that it first trained; None: dropped."""
    age: int | None
    """Its age in that step; None: dropped."""
    environment: str
    task: str
    worker: str
    attempt: int
    offset: int
    """Where its record begins in the data file."""
    length: int
    checksum: int
    """zlib.crc32 of the record."""
    numbers: tuple[Numbers, ...]
    """Reward, status, sampled tokens, tokens, turns, advantage and seconds of each rollout."""

    @property
    def rollouts(self) -> tuple[RolloutRow, ...]:
        return tuple(RolloutRow(self, sibling, *numbers) for sibling, numbers in enumerate(self.numbers))

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the rollouts that have one."""
        return tuple(reward for reward, *_ in self.numbers if reward is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts to list; None accepts all. Bounds are inclusive; a rollout without the value is not within bounds."""

    environment: str | None = None
    fate: str | None = None
    """`trained`, `dropped` (for any reason), or the reason of a drop."""
    status: str | None = None
    group: str | None = None
    task: str | None = None
    worker: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: int | None = None
    max_age: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_sampled: int | None = None
    """Number of sampled tokens."""
    max_sampled: int | None = None
    text: str | None = None
    """In a message of the conversation or in the prompt, ignoring case. Needs the groups to be read."""

    def accepts_group(self, group: GroupRow) -> bool:
        """Whether rollouts of this group may be listed."""
        return (
            self.environment in (None, group.environment)
            and (self.fate in (None, group.fate) or (self.fate == "dropped" and group.fate != TRAINED))
            and self.group in (None, group.id)
            and self.task in (None, group.task)
            and self.worker in (None, group.worker)
            and _within(group.age, self.min_age, self.max_age)
            and _within(group.step, self.min_step, self.max_step)
        )

    def accepts(self, rollout: RolloutRow) -> bool:
        """Whether this rollout of an accepted group is listed, apart from `text`."""
        return (
            self.status in (None, rollout.status)
            and _within(rollout.reward, self.min_reward, self.max_reward)
            and _within(rollout.sampled, self.min_sampled, self.max_sampled)
        )


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def write_row(group: GroupRow) -> bytes:
    return compact_json({name: getattr(group, name) for name in GroupRow.__dataclass_fields__})


def read_row(line: bytes) -> GroupRow | None:
    """Return the group of a line; None if it is not one of the index."""
    try:
        fields = json.loads(line)
        numbers = tuple(_numbers(*each) for each in fields.pop("numbers"))
        return GroupRow(**cast("dict[str, Any]", fields), numbers=numbers)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _numbers(
    reward: float | None,
    status: str,
    sampled: int,
    tokens: int,
    turns: int,
    advantage: float | None = None,
    seconds: float | None = None,
) -> Numbers:
    return reward, status, sampled, tokens, turns, advantage, seconds
