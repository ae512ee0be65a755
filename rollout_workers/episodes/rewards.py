"""What a score may be, and whether the scores of a group teach anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_rl.types import Rollout, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward together with the named parts it is made of; the parts are only for the metrics."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardFailed(Exception):
    """Scoring broke; the cause says how. There is no reward, which is not the same as a reward of 0."""


def as_score(given: float | Score) -> Score:
    """The score with every number checked: a NaN here would poison the whole group's baseline."""
    score = given if isinstance(given, Score) else Score(reward=_finite("the reward", given))
    return Score(
        reward=_finite("the reward", score.reward),
        parts={name: _finite(f"reward part {name!r}", part) for name, part in score.parts.items()},
    )


def _finite(what: str, number: object) -> float:
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {number!r}")
    return float(number)


def has_signal(rollouts: Sequence[Rollout]) -> bool:
    """Whether the rewards differ: under a group baseline equal ones make every advantage 0."""
    return len({rollout.reward for rollout in rollouts if rollout.status is not Status.FAILED}) > 1
