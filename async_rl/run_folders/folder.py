"""The folder of a run, what is in it, and how runs are found."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml

from async_rl.config.loading import masked
from async_rl.errors import ConfigError
from async_rl.run_folders.state import RunStatus, read_state
from async_rl.telemetry.evaluation_rows import EvaluationRow, read_evaluation
from async_rl.telemetry.rows import MetricRow, read_last_evaluation, read_last_row

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
FILES = {
    CONFIG: "the configuration, resolved",
    METRICS: "metrics, a row per step",
    "warnings.jsonl": "warnings of all processes",
    "samples.jsonl": "sampled rollouts",
    "trained.jsonl": "the groups of each step",
    "summary.json": "the summary",
    "curves.png": "the curves",
    "report.html": "the report",
    "eval": "evaluations, with every answer",
    "checkpoints": "checkpoints",
    "events": "recorded events, for the page and traces",
    "rollouts": "recorded rollouts",
    "archive": "trained rollouts",
    "logs": "what the processes printed",
    "redis": "the replay buffer",
}
"""What a run's folder may hold, in the order in which people ask for it."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as written, with secrets masked; empty if it cannot be read."""
        try:
            tree: Any = yaml.safe_load((self.path / CONFIG).read_text())
        except (OSError, ValueError, yaml.YAMLError):  # ValueError: not UTF-8
            return {}
        return cast("dict[str, Any]", masked(tree)) if isinstance(tree, dict) else {}

    def setting(self, *keys: str) -> Any:
        """A value of the configuration; None if it is not there."""
        tree: Any = self.config
        for key in keys:
            tree = cast("dict[str, Any]", tree).get(key) if isinstance(tree, dict) else None
        return tree

    @property
    def made_as(self) -> Path | None:
        """Where the run was started, by its configuration; elsewhere it is a copy, or was moved. None: it does not say."""
        folder, name = self.setting("run", "folder"), self.setting("run", "name")
        if not isinstance(folder, str) or not isinstance(name, str) or not Path(folder).is_absolute():
            return None
        return Path(folder) / name

    @property
    def steps(self) -> int | None:
        """The number of steps to train."""
        steps = self.setting("learner", "steps")
        return steps if isinstance(steps, int) else None

    def last_row(self) -> MetricRow | None:
        return read_last_row(self.metrics)

    def last_evaluation(self) -> EvaluationRow | None:
        row = read_last_evaluation(self.metrics)
        return None if row is None else read_evaluation(row)

    def state(self, row: MetricRow | None) -> RunStatus:
        """The state, given the last row."""
        step, at = (None, None) if row is None else (row.step, row.time)
        return read_state(self.path, step=step, last_row=at, steps=self.steps)

    def files(self) -> dict[str, str]:
        """What the folder holds, with a description."""
        return {name: what for name, what in FILES.items() if (self.path / name).exists()}

    def size(self) -> int:
        """Bytes of all files."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
                except OSError:  # removed meanwhile
                    continue
        return total


def find_runs(parent: Path) -> list[RunFolder]:
    """The runs in a folder, the one that was started last first."""
    found = [path.parent for path in parent.glob(f"*/{CONFIG}")]
    return [RunFolder(path=path) for path in sorted(found, key=lambda path: (path / CONFIG).stat().st_mtime, reverse=True)]


def find_run(name: str, parent: Path) -> RunFolder:
    """The run of this name in a folder, or in the folder that is given by path. Raises ConfigError."""
    for path in (parent / name, Path(name)):
        if (path / CONFIG).is_file():
            return RunFolder(path=path.absolute())
    known = [run.name for run in find_runs(parent)]
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}?" if near else "`async-rl runs ls` lists those that are there (--run.folder FOLDER)"
    raise ConfigError(f"there is no run {name!r} in {parent.absolute()}; {meant}")


def newest_of(files: Sequence[Path], parent: Path) -> RunFolder:
    """The newest run that was named after the last of these configuration files. Raises ConfigError."""
    stem = files[-1].stem
    for run in find_runs(parent):
        if re.fullmatch(rf"{re.escape(stem)}-\d{{8}}-\d{{6}}", run.name):
            return run
    raise ConfigError(f"no run of {files[-1]} is in {parent.absolute()}; name one: async-rl runs ls")
