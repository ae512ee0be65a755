"""What trackers show beside curves: samples of rollouts, evaluations as tables, ages as a histogram."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.telemetry.evaluation_rows import read_evaluation
from async_rl.telemetry.rows import rows_from

ROWS_PER_TABLE = 100
"""Samples of which one table is made: many small tables slow a tracker's page down."""
LONGEST_TEXT = 4000
SAMPLE_COLUMNS = ("step", "environment", "prompt", "text", "reward", "age")
EVALUATION_COLUMNS = ("step", "version", "environment", "measure", "mean", "low", "high", "tasks")
AGE_PREFIX = "staleness/age_"

Cell = str | float | int | None


class NewSamples:
    """The rows of samples.jsonl that came since the last call."""

    def __init__(self, run_folder: Path) -> None:
        self._path, self._offset = run_folder / "samples.jsonl", 0
        if self._path.exists():  # a resumed run has sent the earlier ones
            self._offset = self._path.stat().st_size
        self._waiting: list[list[Cell]] = []

    def take(self, *, least: int) -> list[list[Cell]]:
        """All rows not taken yet, if there are at least so many; cells are in the order of SAMPLE_COLUMNS."""
        lines, self._offset = rows_from(self._path, self._offset)
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            self._waiting.append([_cell(row.get(column)) for column in SAMPLE_COLUMNS])
        if len(self._waiting) < max(least, 1):
            return []
        taken, self._waiting = self._waiting, []
        return taken


def _cell(value: Any) -> Cell:
    return value[:LONGEST_TEXT] if isinstance(value, str) else value


def evaluation_table(metrics: Mapping[str, float]) -> list[list[Cell]]:
    """The evaluation in a row of metrics, a line per measure, in the order of EVALUATION_COLUMNS; empty if it has none."""
    found = read_evaluation(metrics)
    if found is None:
        return []
    return [
        [found.step, found.version, name, measure, value.mean, value.low, value.high, each.tasks]
        for name, each in found.environments.items()
        for measure, value in each.measures.items()
    ]


def ages_of(metrics: Mapping[str, float]) -> dict[int, int]:
    """Groups of a step by their age, in order."""
    found = {int(name.removeprefix(AGE_PREFIX)): int(value) for name, value in metrics.items() if name.startswith(AGE_PREFIX)}
    return dict(sorted(found.items()))


def repeated(ages: Mapping[int, int]) -> Sequence[int]:
    """The age of each group, for histograms made from single values."""
    return [age for age, count in ages.items() for _ in range(count)]
