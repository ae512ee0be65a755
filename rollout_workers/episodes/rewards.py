"""Scores: checking them, and whether those of a group carry a learning signal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_rl.types import Rollout, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with the named parts it is made of. The parts are only used for metrics."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardFailed(Exception):
    """Scoring raised; `__cause__` says why. The episode then has no reward, which differs from a reward of 0."""


def as_score(given: float | Score) -> Score:
    """Check every number of a score: a NaN would spoil the baseline of the whole group. Raises ValueError."""
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
    """Return whether the rewards differ: with a group baseline, equal rewards make every advantage 0."""
    return len({rollout.reward for rollout in rollouts if rollout.status is not Status.FAILED}) > 1
