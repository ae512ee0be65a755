"""The runs of examples/slow_runs, which are slow in four ways: the overview names the cause of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.recording import Recording
from async_rl.view.opened_run import open_folder
from async_rl.view.recorded.slowdown import Slowdowns
from tests.support.repository import ROOT
from tests.support.run_processes import program

CAUSES = {
    "blocked_environment": ("The environment counting blocks its worker at slow_parts.py:", "in reward", "await in_process"),
    "starved_learner": (
        "The learner waits for rollouts",
        "generating",
        "worker.groups_in_flight allows 1",
        "raise worker.groups_in_flight",
    ),
    "slow_grader": ("The learner waits for rollouts", "in grading: the reward is slow", "raise worker.groups_in_flight"),
    "slow_push": ("Weights are slow to arrive", "raise wire.push_every_steps (now 1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
def test_the_overview_names_the_cause(tmp_path: Path, name: str):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # environments are named relative to where a run is started
    file = f"examples/slow_runs/{name}.yaml"
    with program(tmp_path, "run", "@", file, "--run.folder", tmp_path, "--run.name", name) as run:
        assert run.exit_code() == 0, run.output
    opened = open_folder(tmp_path / name)
    assert isinstance(opened.config, Config), opened.problem
    found = Slowdowns(Recording(opened.path), opened.config)
    found.refresh()
    gravest = found.causes[0].sentence
    assert all(part in gravest for part in CAUSES[name]), gravest
