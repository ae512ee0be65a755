"""metrics.jsonl: one JSON object per logged row, appended for as long as the run lives.

    {"step": 12, "time": 1767225600.0, "reward/mean": 0.41, ...}
    {"resumed_after": 10}

Rows of one step add up: a later value of a name replaces an earlier one. A learner that resumes from step 10 first
appends `resumed_after`, and every row above that step before the mark is superseded: those steps are trained again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    step: int
    time: float
    """Unix time at which the step's last row was written."""
    values: Mapping[str, float]


class JsonlSink:
    def __init__(self, path: Path, *, resumed_after: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)  # a row is on its way to the disk before the next step begins
        size = self._file.seek(0, 2)
        if size > 0:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":  # a crash cut the last row
                self._file.write(b"\n")
            self._append({"resumed_after": resumed_after})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._append({"step": step, "time": time.time(), **finite})

    def close(self) -> None:
        self._file.close()

    def _append(self, row: Mapping[str, float | None]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, float]]:
    """Each line as it was written, without what is not a number. A line cut by a crash is passed over."""
    for line in path.read_text().splitlines():
        try:
            parsed: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            yield {name: value for name, value in cast("dict[str, float | None]", parsed).items() if value is not None}


def read_rows(path: Path) -> list[MetricRow]:
    """One row per step that counts, in order."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_lines(path):
        if "resumed_after" in row:
            steps = {step: values for step, values in steps.items() if step <= row["resumed_after"]}
        elif "step" in row:
            steps.setdefault(int(row["step"]), {}).update(row)
    return [_row(step, steps[step]) for step in sorted(steps)]


def _row(step: int, found: Mapping[str, float]) -> MetricRow:
    values = {name: value for name, value in found.items() if name not in ("step", "time")}
    return MetricRow(step=step, time=found["time"], values=values)
