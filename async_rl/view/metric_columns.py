"""The rows of metrics.jsonl as columns, reduced to as many points as a chart has pixels.

file row        0      1      2      3: resumed_after 1      4
step            1      2      3      (2 and 3 are gone)      2        first_changed(since=3) is 2
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NAN = math.nan
MEAN = "mean:"
"""Prefix of a pattern of which a bucket shows the mean, not the extremes. Of a family (`mean:staleness/age_*`) a member that a
step lacks counts as 0 where the step has others, so that the members add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Columns of equal length, for JSON: None where a step has no value."""

    steps: Sequence[int]
    times: Sequence[float]
    values: Mapping[str, Sequence[float | None]]


class MetricColumns:
    """One value per step and metric, in order of the steps, without superseded steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        """Shorter than `steps` where the last steps have no value."""
        self._changed: list[int] = []
        """For each row that was added, the first step that it changed."""

    @property
    def num_rows(self) -> int:
        return len(self._changed)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def last_time(self) -> float | None:
        return self._times[-1] if self._times else None

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row as `async_rl.telemetry.rows` describes it; others are ignored."""
        if (resumed := row.get("resumed_after")) is not None:
            self._forget_after(int(resumed))
            self._changed.append(int(resumed) + 1)
        elif (step := row.get("step")) is not None:
            place = self._place(int(step))
            self._times[place] = number if (number := row.get("time")) is not None else NAN
            for name, value in row.items():
                if name not in ("step", "time") and isinstance(value, int | float):
                    self._set(name, place, value)
            self._changed.append(int(step))

    def latest(self) -> dict[str, float]:
        """The values of the last step."""
        last = len(self.steps) - 1
        return {
            name: column[last]
            for name, column in self._columns.items()
            if len(column) == last + 1 and math.isfinite(column[last])
        }

    def newest(self, name: str) -> float | None:
        """The last value of a metric that not every step has."""
        return next((value for value in reversed(self._columns.get(name, ())) if not math.isnan(value)), None)

    def column(self, name: str) -> Floats:
        """All values of a metric, NaN where a step has none."""
        return self._whole(name, 0)

    def first_changed(self, since: int) -> int | None:
        """The first step that the rows from `since` on have changed; None if there are none."""
        return min(self._changed[since:], default=None)

    def matching(self, pattern: str) -> list[str]:
        """The metrics that match a pattern such as `policy/age_*/ess`."""
        bare = pattern.removeprefix(MEAN)
        if "*" not in bare:
            return [bare] if bare in self._columns else []
        return sorted(name for name in self._columns if fnmatchcase(name, bare))

    def series(self, patterns: Iterable[str], *, points: int, from_step: int = 0) -> Series:
        """The steps from `from_step` on. If they are more than `points`, each pair of points stands for a bucket of them."""
        first = bisect_left(self.steps, from_step)
        steps, times = np.array(self.steps[first:], np.int64), np.array(self._times[first:])
        buckets = _Buckets(len(steps), points) if len(steps) > points else None
        values: dict[str, Floats] = {}
        for pattern in patterns:
            names = self.matching(pattern)
            found = {name: self._whole(name, first) for name in names}
            if is_mean := pattern.startswith(MEAN):
                found = _filled(found)
            if buckets is not None:
                reduce = buckets.means if is_mean else buckets.extremes
                found = {name: reduce(each) for name, each in found.items()}
            values |= found
        if buckets is not None:
            steps, times = steps[buckets.kept], times[buckets.kept]
        return Series(
            steps=steps.tolist(),
            times=[round(moment, 1) for moment in times.tolist()],
            values={name: [_short(value) for value in each.tolist()] for name, each in values.items()},
        )

    def _whole(self, name: str, first: int) -> Floats:
        given = np.array(self._columns.get(name, ())[first:], np.float64)
        return np.append(given, np.full(len(self.steps) - first - len(given), NAN))

    def _place(self, step: int) -> int:
        """The position of a step, which is made if there is none."""
        place = bisect_left(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            self._times.insert(place, NAN)
            for column in self._columns.values():
                if len(column) > place:
                    column.insert(place, NAN)
        return place

    def _set(self, name: str, place: int, value: float) -> None:
        column = self._columns.setdefault(name, array("d"))
        if (missing := place + 1 - len(column)) > 0:
            column.extend([NAN] * missing)
        column[place] = value

    def _forget_after(self, step: int) -> None:
        kept = bisect_left(self.steps, step + 1)
        del self.steps[kept:], self._times[kept:]
        for column in self._columns.values():
            del column[kept:]


class _Buckets:
    """Equal shares of the steps; two points stand for each, at its first and its last step."""

    def __init__(self, num_steps: int, points: int) -> None:
        self._begins = np.linspace(0, num_steps, max(points // 2, 1), endpoint=False).astype(np.int64)
        self._ends = np.append(self._begins[1:], num_steps) - 1
        self.kept = np.stack([self._begins, self._ends], axis=1).ravel()

    def means(self, values: Floats) -> Floats:
        counts = np.add.reduceat((~np.isnan(values)).astype(np.float64), self._begins)
        sums = np.add.reduceat(np.nan_to_num(values), self._begins)
        return np.repeat(np.divide(sums, counts, out=np.full(len(counts), NAN), where=counts > 0), 2)

    def extremes(self, values: Floats) -> Floats:
        """The smallest and the largest value, the largest first where the bucket falls."""
        low, high = np.fmin.reduceat(values, self._begins), np.fmax.reduceat(values, self._begins)
        falls = values[self._begins] > values[self._ends]
        return np.stack([np.where(falls, high, low), np.where(falls, low, high)], axis=1).ravel()


def _filled(family: dict[str, Floats]) -> dict[str, Floats]:
    """0 where a member has no value and another one has."""
    if len(family) < 2:
        return family
    is_there = np.any([~np.isnan(values) for values in family.values()], axis=0)
    return {name: np.where(is_there & np.isnan(values), 0.0, values) for name, values in family.items()}


def _short(value: float) -> float | None:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
