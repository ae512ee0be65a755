"""Stored runs on the page that compares them: evaluations task by task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from async_rl.run_folders.folder import RunFolder
from async_rl.view.compare import compare
from async_rl.view.opened_run import open_folder
from async_rl.view.run_view import RunView
from tests.unit.async_rl.run_folders.stored_runs import store_run


@contextmanager
def viewed(*runs: RunFolder) -> Iterator[list[RunView]]:
    with ExitStack() as opened:
        views = [opened.enter_context(closing(RunView(open_folder(run.path)))) for run in runs]
        for view in views:
            view.refresh()
        yield views


def test_evaluations_are_compared_task_by_task(tmp_path: Path):
    first = store_run(tmp_path, "first", rewards=(0.0, 0.5, 1.0))
    better = store_run(tmp_path, "better", rewards=(0.5, 1.0, 1.5, 9.0))
    single = store_run(tmp_path, "single", rewards=(1.0,))
    with viewed(first, better, single) as views:
        found = compare(views, ["reward/mean"], points=10)
    json.dumps(found, allow_nan=False)
    own, clear, unclear = (run["paired"] for run in found["compared"])
    assert own == []
    about = {"environment": "counting", "step": 5, "other_step": 5}
    assert clear == [
        {
            **about,
            "mean": 0.5,
            "other_mean": 1.0,
            "difference": {"mean": 0.5, "low": 0.5, "high": 0.5, "tasks": 3},
            "is_clear": True,
        }
    ]
    assert unclear == [
        {
            **about,
            "mean": 0.0,
            "other_mean": 1.0,
            "difference": {"mean": 1.0, "low": None, "high": None, "tasks": 1},
            "is_clear": False,
        }
    ]
