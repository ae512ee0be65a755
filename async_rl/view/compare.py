"""Several runs side by side: curves, settings that differ, and evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from async_rl.run_folders.comparison import NAMES_OF_RUNS, PairedDifference, paired_differences
from async_rl.run_folders.folder import RunFolder
from async_rl.view.run_view import RunView

X_AXES = ("progress/tokens", "progress/wall_s")
"""Metrics that a chart may have below it instead of steps."""


def compare(views: Sequence[RunView], patterns: Sequence[str], *, points: int) -> dict[str, Any]:
    """Columns of each run, the settings in which they differ, and their evaluations."""
    return {
        "compared": [
            {
                "name": view.folder.name,
                "problem": view.folder.problem,
                "series": asdict(view.columns.series([*X_AXES, *patterns], points=points)),
                "evaluations": view.evaluations,
                "paired": [_document(each) for each in _paired(views[0], view)],
            }
            for view in views
        ],
        "settings": differing_settings([view.folder.settings for view in views]),
    }


def differing_settings(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of a key and its value in each run, as JSON; "" where a run does not have the key."""
    keys = dict.fromkeys(key for run in runs for key in run if key not in NAMES_OF_RUNS)
    rows = [[key, *(json.dumps(run[key]) if key in run else "" for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _paired(first: RunView, other: RunView) -> list[PairedDifference]:
    """The evaluations that both have written, compared task by task; of a run with itself there is nothing to say."""
    if first is other:
        return []
    return paired_differences(RunFolder(path=first.folder.path), RunFolder(path=other.folder.path))


def _document(paired: PairedDifference) -> dict[str, Any]:
    """For JSON, which has no infinite bounds: a single task gives no interval."""
    bounds = {name: value if isfinite(value) else None for name, value in asdict(paired.difference).items()}
    return asdict(paired) | {"difference": bounds, "is_clear": paired.is_clear}
