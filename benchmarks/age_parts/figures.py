"""What is made of the metrics of a run: the line of its cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from age_parts.cells import TASKS, Cell, Task

LAST = 10
"""Step batches of the final reward."""
COLLAPSE = 0.8
"""A run whose final reward is below this share of its best window has collapsed."""
STEPS_AFTER_TARGET = 30
POINTS = 24
"""Points kept of a reward curve."""

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The policy of one step batch: what it had been trained on when it sampled the batch, and the reward of the batch."""

    step: float
    samples: float
    reward: float


def curve_of(rows: Sequence[Row]) -> list[Point]:
    """Return the reward over what the sampling policy had been trained on, without the delay that age puts between them."""
    points: list[Point] = []
    for step, row in enumerate(rows, start=1):
        sampled_after = max(step - 1 - row["staleness/mean"], 0.0)
        points.append(
            Point(step=sampled_after, samples=row["progress/samples"] * sampled_after / step, reward=row["reward/mean"])
        )
    return points


def reached(points: Sequence[Point], task: Task) -> int | None:
    """Return the index of the first point that ends a window with a mean of at least the target."""
    return next((end for end, reward in windows(points, task) if reward >= task.target), None)


def windows(points: Sequence[Point], task: Task) -> Iterable[tuple[int, float]]:
    """Yield the index of the last point of every window, and its mean reward."""
    for end in range(task.window, len(points) + 1):
        yield end - 1, mean(point.reward for point in points[end - task.window : end])


def is_over(cell: Cell, rows: Sequence[Row]) -> bool:
    at = reached(curve_of(rows), TASKS[cell.task])
    return at is not None and len(rows) > at + STEPS_AFTER_TARGET + cell.age


def result_of(cell: Cell, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a run."""
    points, task = curve_of(rows), TASKS[cell.task]
    at = reached(points, task)
    best = max(reward for _, reward in windows(points, task))
    final = mean(point.reward for point in points[-LAST:])
    settled = [row["staleness/mean"] for row in rows[cell.age :]] or [rows[-1]["staleness/mean"]]
    every = max(1, math.ceil(len(points) / POINTS))
    chunks = [points[begin : begin + every] for begin in range(0, len(points), every)]
    return {
        "samples": None if at is None else round(points[at].samples),
        "wall_s": None if at is None else round(rows[round(points[at].step)]["progress/wall_s"], 1),
        "trained": int(rows[-1]["progress/samples"]),
        "steps": len(rows),
        "final": round(final, 3),
        "best": round(best, 3),
        "collapsed": final < COLLAPSE * best,
        "age": round(mean(settled), 2),
        "ess": round(mean(row["policy/ess"] for row in rows), 3),
        "bounded": round(mean(row["policy/clip_frac"] + row["policy/masked_frac"] for row in rows), 3),
        "curve": [[round(mean(p.step for p in chunk)), round(mean(p.reward for p in chunk), 3)] for chunk in chunks],
    }
