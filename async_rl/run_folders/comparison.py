"""Compares runs: settings that differ, last figures side by side, and evaluations task by task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rl.config.loading import leaves
from async_rl.run_folders.folder import RunFolder
from async_rl.telemetry.estimates import Estimate, estimate_mean
from async_rl.telemetry.rows import MetricRow, read_objects

LAST_ROWS = 3
"""Steps over which last figures are averaged."""
COMPARED = (
    "reward/mean",
    "rollout/reward",
    "episode/length",
    "staleness/mean",
    "staleness/max",
    "policy/ess",
    "train/loss",
    "held_out/loss",
    "perf/tok_s",
    "rollout/tok_s",
    "time/step",
    "idle/learner",
    "progress/tokens",
    "progress/samples",
    "progress/wall_s",
)
TOTALS = "progress/"
"""Prefix of metrics that add up, of which the last value counts."""
NAMES_OF_RUNS = ("run.name", "run.folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The difference of two runs' evaluations in one environment, over the tasks that both played."""

    environment: str
    step: int
    """The step of the first run's evaluation."""
    other_step: int
    mean: float
    """Mean reward over the common tasks, in the first run."""
    other_mean: float
    difference: Estimate
    """The other minus the first, task by task, with its 95 % interval."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


def differing_settings(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Settings that differ, by dotted key, with the value in each run as JSON; "-" where a run does not have the key."""
    flat = [{".".join(keys): json.dumps(value) for keys, value in leaves(run.config)} for run in runs]
    keys = sorted({key for each in flat for key in each})
    rows = {key: [each.get(key, "-") for each in flat] for key in keys if key not in NAMES_OF_RUNS}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def last_figures(rows: Sequence[MetricRow]) -> dict[str, float]:
    """The compared metrics of a run: means over its last steps, and totals."""
    found: dict[str, float] = {}
    for name in COMPARED:
        values = [row.values[name] for row in rows if name in row.values][-LAST_ROWS:]
        if values:
            found[name] = values[-1] if name.startswith(TOTALS) else fmean(values)
    return found


def paired_differences(first: RunFolder, other: RunFolder) -> list[PairedDifference]:
    """Compare the evaluations of two runs: of the last step that both evaluated, else of the last of each."""
    mine, others = _evaluated_steps(first), _evaluated_steps(other)
    if not mine or not others:
        return []
    common = max(mine.keys() & others.keys(), default=None)
    step, other_step = (common, common) if common is not None else (max(mine), max(others))
    left, right = _rewards(mine[step]), _rewards(others[other_step])
    found: list[PairedDifference] = []
    for environment in sorted(left.keys() & right.keys()):
        tasks = sorted(left[environment].keys() & right[environment].keys())
        if tasks:
            pairs = [(left[environment][task], right[environment][task]) for task in tasks]
            found.append(
                PairedDifference(
                    environment=environment,
                    step=step,
                    other_step=other_step,
                    mean=fmean(mine for mine, _ in pairs),
                    other_mean=fmean(its for _, its in pairs),
                    difference=estimate_mean([its - mine for mine, its in pairs]),
                )
            )
    return found


def _evaluated_steps(run: RunFolder) -> dict[int, Path]:
    """The file of the evaluation of each step, the one of the highest version."""
    found: dict[int, tuple[int, Path]] = {}
    for path in (run.path / "eval").glob("step-*-version-*.jsonl"):
        _, step, _, version = path.stem.split("-")
        found[int(step)] = max(found.get(int(step), (-1, path)), (int(version), path))
    return {step: path for step, (_, path) in found.items()}


def _rewards(path: Path) -> Mapping[str, Mapping[str, float]]:
    """Environment -> task -> mean reward of its samples; tasks of which all samples failed are absent."""
    found: dict[str, dict[str, float]] = {}
    for row in read_objects(path):
        if "task" in row and (rewards := _scored(row["samples"])):
            found.setdefault(row["environment"], {})[row["task"]] = fmean(rewards)
    return found


def _scored(samples: Iterable[Mapping[str, Any]]) -> list[float]:
    return [sample["reward"] for sample in samples if sample["reward"] is not None]
