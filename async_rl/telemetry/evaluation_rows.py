"""Reads evaluations from the rows of metrics.jsonl.

eval/step, eval/version            which weights were evaluated
eval/counting/pass@1               a measure of one environment; its 95 % interval has the suffixes _low and _high
eval/counting/tasks                number of distinct tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from async_rl.telemetry.rows import read_lines

LOW, HIGH = "_low", "_high"
PREFIX = "eval/"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredValue:
    mean: float
    low: float | None
    high: float | None
    """low and high are None with a single task, which gives no interval."""

    def __str__(self) -> str:
        bounds = f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None and self.high is not None else ""
        return f"{self.mean:.3f}{bounds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEnvironment:
    tasks: int
    measures: Mapping[str, MeasuredValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    step: int
    version: int
    environments: Mapping[str, EvaluatedEnvironment]

    @property
    def lines(self) -> list[str]:
        """One line per environment, for display."""
        return [f"evaluation of step {self.step}: {name}  {_words(each)}" for name, each in self.environments.items()]


def read_evaluation(row: Mapping[str, float]) -> EvaluationRow | None:
    """The evaluation in a row of metrics; None if it has none."""
    if "eval/step" not in row:
        return None
    found: dict[str, dict[str, float]] = {}
    for name, value in row.items():
        environment, _, measure = name.removeprefix(PREFIX).rpartition("/")
        if name.startswith(PREFIX) and environment:
            found.setdefault(environment, {})[measure] = value
    return EvaluationRow(
        step=int(row["eval/step"]),
        version=int(row.get("eval/version", -1)),
        environments={name: _environment(values) for name, values in found.items()},
    )


def read_evaluations(path: Path) -> list[EvaluationRow]:
    """All evaluations of a run, ordered by step; the last one of each step, without those of weights that are gone."""
    found: dict[int, EvaluationRow] = {}
    for line in read_lines(path) if path.exists() else ():
        if (resumed_after := line.get("resumed_after")) is not None:
            found = {step: row for step, row in found.items() if step <= resumed_after}
        elif (row := read_evaluation(line)) is not None:
            found[row.step] = row
    return [found[step] for step in sorted(found)]


OTHERS = ("tasks", "failed", "truncated", "length")


def _environment(values: Mapping[str, float]) -> EvaluatedEnvironment:
    measures = {
        name: MeasuredValue(mean=value, low=values.get(name + LOW), high=values.get(name + HIGH))
        for name, value in values.items()
        if name not in OTHERS and not name.endswith((LOW, HIGH))
    }
    return EvaluatedEnvironment(tasks=int(values.get("tasks", 0)), measures=measures)


def _words(each: EvaluatedEnvironment) -> str:
    return "  ".join([*(f"{name} {value}" for name, value in each.measures.items()), f"({each.tasks} tasks)"])
