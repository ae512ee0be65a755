"""Pure: estimates of scores from samples of many tasks, with confidence intervals.

The samples of a task are not independent, so the task is the unit: each gives one value, and intervals come from the
number of tasks and their spread. More samples sharpen the values of the tasks, not their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, cos, inf, pi, prod, sin, sqrt
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of k samples is right, from `right` of `samples`; unbiased.

    1 - C(samples - right, k) / C(samples, k): the share of all choices of k samples that contain a right one. The plain
    1 - (1 - right / samples)^k is too low on average.
    """
    if not 0 <= right <= samples:
        raise ValueError(f"{right} of {samples} samples cannot be right")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a task, there are {samples}")
    wrong = samples - right
    return 1 - prod((wrong - drawn) / (samples - drawn) for drawn in range(k)) if wrong >= k else 1.0


def estimate_share(values: Sequence[float]) -> Estimate:
    """Estimate from one value in [0, 1] per task, such as pass@k. The interval is Wilson's, which stays within [0, 1].
    It is exact for values of 0 or 1; other shares vary less, so it is a little too wide for them.
    """
    tasks, mean = len(values), _mean(values)
    spread = Z * sqrt(mean * (1 - mean) / tasks + Z**2 / (4 * tasks**2))
    middle, scale = mean + Z**2 / (2 * tasks), 1 + Z**2 / tasks
    return Estimate(mean=mean, low=max(0.0, (middle - spread) / scale), high=min(1.0, (middle + spread) / scale), tasks=tasks)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Estimate from one mean reward per task, whatever its range. The interval is Student's, from the standard error between
    tasks; infinite for a single task, which says nothing about the spread.
    """
    tasks, mean = len(values), _mean(values)
    spread = student_quantile(tasks - 1) * stdev(values) / sqrt(tasks) if tasks > 1 else inf
    return Estimate(mean=mean, low=mean - spread, high=mean + spread, tasks=tasks)


@cache
def student_quantile(degrees: int) -> float:
    """The t that Student's distribution exceeds in absolute value with probability 1 - CONFIDENCE: 4.30 for 2 degrees of
    freedom, 2.04 for 30, and Z in the limit.
    """
    low, high = 0.0, 16.0  # 12.7 for one degree
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    """P(|T| <= t), in closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(degrees))
    even = degrees % 2 == 0
    term = total = (1.0 if even else cos(angle)) if degrees > 1 else 0.0
    for place in range(1 if even else 2, degrees - 2, 2):
        term *= cos(angle) ** 2 * place / (place + 1)
        total += term
    return sin(angle) * total if even else 2 / pi * (angle + sin(angle) * total)


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no task has a value: there is nothing to estimate")
    return fmean(values)
