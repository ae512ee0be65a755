"""Trackers hold every metric of a run, its tables, and go on after a restart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

REASON = "{} is not installed: make test-adapters"
LIVES = """
import json, sys
from pathlib import Path
from async_rl.config.loading import load
from async_rl.telemetry import open_sinks
folder, *settings = sys.argv[1:]
place = ["--run.name", "r", "--run.folder", folder, "--metrics.console", "false"]
config = load(["@", "configs/quickstart.yaml", *place, *settings])
evaluated = {"eval/step": 1, "eval/version": 1, "eval/counting/tasks": 4, "eval/counting/pass@1": 0.5}
for life in (0, 1):
    with open_sinks(config, resumed_after=2 * life) as sinks:
        for step in (2 * life + 1, 2 * life + 2):
            sinks.log(step, {"reward/mean": step / 4, "staleness/age_0": 2, "staleness/age_3": 1, **evaluated})
            row = {"step": step, "environment": "counting", "prompt": "1=", "text": f"said {step}", "reward": None, "age": 1}
            with (config.run_folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\\n")
"""


def live_twice(folder: Path, *settings: str, **environment: str) -> None:
    places = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment}
    line = [sys.executable, "-c", LIVES, str(folder), *settings]
    done = subprocess.run(line, env=places, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "stopped" not in done.stderr, done.stderr


def test_trackio_has_all_steps_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason=REASON.format("trackio"))
    live_twice(tmp_path, "--metrics.trackio_project", "p", TRACKIO_DIR=str(tmp_path / "trackio"))
    code = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("p")
print(json.dumps(SQLiteStorage.get_logs("p", run), default=str))
"""
    places = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    said = subprocess.run([sys.executable, "-c", code], env=places, capture_output=True, text=True, timeout=120, check=True)
    rows = json.loads(said.stdout.splitlines()[-1])
    assert {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row} == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    text = json.dumps(rows)
    assert "tables/age" in text
    assert "pass@1" in text
    for step in (1, 2, 3, 4):
        assert f"said {step}" in text


def test_mlflow_has_all_steps_in_one_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason=REASON.format("mlflow-skinny"))
    store = f"file:{tmp_path}/mlruns"
    live_twice(tmp_path, "--metrics.mlflow_experiment", "e", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/reward/mean")
    assert [(float(line.split()[1]), int(line.split()[2])) for line in metric.read_text().splitlines()] == [
        (0.25, 1),
        (0.5, 2),
        (0.75, 3),
        (1.0, 4),
    ]
    run = metric.parents[2]
    assert (run / "metrics" / "eval" / "counting" / "pass_at_1").exists()
    assert (run / "params" / "staleness.max_age").read_text() == "3.0"
    tables = "".join(file.read_text() for file in run.glob("artifacts/samples/*.json"))
    assert set(re.findall(r"said \d", tables)) == {"said 1", "said 2", "said 3", "said 4"}
    evaluation = json.loads(next(run.glob("artifacts/evaluation/*.json")).read_text())
    assert evaluation["columns"][3:5] == ["measure", "mean"]
    assert mlflow.__version__


def test_wandb_has_every_metric_and_tables_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=REASON.format("wandb"))
    checkpoint = tmp_path / "r" / "checkpoints" / "step-00000002-by-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    live_twice(tmp_path, "--metrics.wandb_project", "p", WANDB_MODE="offline", WANDB_SILENT="true")
    lives = sorted(tmp_path.glob("r/wandb/offline-run-*"))
    assert len(lives) == 2, "an offline folder per life, with one id, which `wandb sync` merges"
    assert all((life / "run-r.wandb").exists() for life in lives)
    for life, steps in zip(lives, ((1, 2), (3, 4)), strict=True):
        recorded = (life / "run-r.wandb").read_bytes()
        for name in (b"reward/mean", b"eval/counting/pass@1", b"staleness/age_3", b"tables/age"):
            assert name in recorded, name
        tables = "".join(file.read_text() for file in life.glob("files/media/table/tables/*.table.json"))
        assert "pass@1" in tables
        for step in steps:
            assert f"said {step}" in tables
