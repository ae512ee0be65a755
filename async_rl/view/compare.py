"""Several runs side by side: curves, settings that differ, and evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from async_rl.view.run_view import RunView

X_AXES = ("progress/tokens", "progress/wall_s")
"""Metrics that a chart may have below it instead of steps."""
NAMES_OF_RUNS = ("run.name", "run.folder")


def compare(views: Sequence[RunView], patterns: Sequence[str], *, points: int) -> dict[str, Any]:
    """Columns of each run, the settings in which they differ, and their evaluations."""
    return {
        "compared": [
            {
                "name": view.folder.name,
                "problem": view.folder.problem,
                "series": asdict(view.columns.series([*X_AXES, *patterns], points=points)),
                "evaluations": view.evaluations,
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
