"""metrics.jsonl: one JSON object per logged row.

    {"step": 12, "time": 1767225600.0, "reward/mean": 0.41, ...}
    {"resumed_after": 10}

Rows of one step are merged; later values replace earlier ones. A learner that resumes from step 10 first appends
`resumed_after`, which supersedes all earlier rows above that step, because those steps are trained again. Rows that cannot be
written are dropped; a long file is rotated to metrics.jsonl.1 (`metrics.max_mb`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from async_rl.durable.best_effort import BestEffortRows, older, read_backwards, read_best_effort


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    step: int
    time: float
    """Unix time at which the step's last row was written."""
    values: Mapping[str, float]


class JsonlSink:
    def __init__(self, path: Path, *, resumed_after: int, max_bytes: int) -> None:
        self._rows = BestEffortRows(path, max_bytes=max_bytes)
        is_new = not path.exists() and not older(path).exists()
        self._mark = None if is_new else json.dumps({"resumed_after": resumed_after}).encode()
        """The `resumed_after` row, until it is written; it must precede all other rows."""
        self.dropped = 0
        """Rows that could not be written."""
        self._write_mark()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        row = json.dumps({"step": step, "time": time.time(), **finite}).encode()
        if not (self._write_mark() and self._rows.add(row)):
            self.dropped += 1

    def _write_mark(self) -> bool:
        if self._mark is not None and self._rows.add(self._mark):
            self._mark = None
        return self._mark is None

    def close(self) -> None:
        self._rows.close()


def read_lines(path: Path) -> Iterator[dict[str, float]]:
    """The rows in file order, without non-numbers."""
    return map(_numbers, read_objects(path))


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a best-effort row file, in file order. A partial line is skipped."""
    return _objects(read_best_effort(path))


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            parsed: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            yield cast("dict[str, Any]", parsed)


def read_rows(path: Path) -> list[MetricRow]:
    """One merged row per step, in order, without superseded rows."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_lines(path):
        if "resumed_after" in row:
            steps = {step: values for step, values in steps.items() if step <= row["resumed_after"]}
        elif "step" in row:
            steps.setdefault(int(row["step"]), {}).update(row)
    return [_row(step, steps[step]) for step in sorted(steps)]


def read_last_row(path: Path) -> MetricRow | None:
    """The row of the last step, as `read_rows` has it. Its time and memory do not grow with the file."""
    superseded, found = math.inf, dict[str, float]()
    for row in map(_numbers, _objects(read_backwards(path))):
        if "resumed_after" in row:
            superseded = min(superseded, row["resumed_after"])
        elif "step" in row and row["step"] <= superseded:
            if row["step"] != found.get("step", row["step"]):
                break
            found = row | found
    return _row(int(found["step"]), found) if found else None


def _row(step: int, found: Mapping[str, float]) -> MetricRow:
    values = {name: value for name, value in found.items() if name not in ("step", "time")}
    return MetricRow(step=step, time=found["time"], values=values)


class SeriesReader:
    """Reads some metrics of all steps from metrics.jsonl as it grows: each `read` continues where the last one ended."""

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self._path, self._names = path, frozenset({*names, "time"})
        self._steps: dict[int, dict[str, float]] = {}
        self._file: int | None = None
        self._offset = 0

    def read(self) -> list[MetricRow]:
        """One merged row per step, in order, without superseded rows; only the chosen metrics."""
        lines: list[bytes] = []
        if self._path.exists():
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file:  # the first call, or the file was rotated
                    lines, self._offset = rows_from(older(self._path), self._offset)[0], 0
                self._file = number
            new, self._offset = rows_from(self._path, self._offset)
            lines += new
        for row in map(_numbers, _objects(lines)):
            if "resumed_after" in row:
                self._steps = {step: values for step, values in self._steps.items() if step <= row["resumed_after"]}
            elif "step" in row:
                chosen = {name: value for name, value in row.items() if name in self._names}
                self._steps.setdefault(int(row["step"]), {}).update(chosen)
        return [_row(step, self._steps[step]) for step in sorted(self._steps)]


def rows_from(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The whole rows after an offset, and where they end; from the beginning if the file was replaced by a shorter one."""
    if not path.exists():
        return [], offset
    if path.stat().st_size < offset:
        offset = 0
    with path.open("rb") as file:
        file.seek(offset)
        new = file.read()
    end = new.rfind(b"\n") + 1
    return new[:end].splitlines(), offset + end


def read_last_evaluation(path: Path) -> dict[str, float] | None:
    """The last row that contains an evaluation, but for those of weights that are gone; None if there is none."""
    resumed_after = math.inf
    lines = (line for line in read_backwards(path) if b'"eval/step"' in line or b'"resumed_after"' in line)
    for row in map(_numbers, _objects(lines)):
        if "resumed_after" in row:
            resumed_after = min(resumed_after, row["resumed_after"])
        elif row.get("eval/step", math.inf) <= resumed_after:
            return row
    return None
