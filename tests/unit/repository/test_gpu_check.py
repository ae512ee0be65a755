"""benchmarks/gpu_check.py runs each check apart: one that fails, hangs or dies is reported and costs no other."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"

CHECKS = """
import os, pathlib, subprocess, sys, time
way = os.environ["WAY"]
if way == "hangs":
    print("about to wait", flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["PID"]).write_text(str(child.pid))
    time.sleep(600)
if way == "dies":
    print("the last words", flush=True)
    os._exit(3)
if way == "lacks":
    raise ModuleNotFoundError("No module named 'redis'", name="redis")
subprocess.run(["echo", "said by a process of its own"])
raise ValueError("went wrong")
"""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    return tmp_path


def runner(gpu_check: ModuleType, *, is_warm: bool = True, budget_s: float = 60.0) -> Any:
    return gpu_check.Runner(device="cpu", budget_s=budget_s, is_warm=is_warm)


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize(
    ("way", "outcome", "reason", "traceback", "last_words"),
    [
        ("fails", "failed", "ValueError: went wrong", "ValueError: went wrong", "said by a process of its own"),
        ("dies", "failed", "its process ended with code 3", "", "the last words"),
        ("lacks", "skipped", "redis is not installed", "", ""),
    ],
)
def test_what_became_of_a_check(
    gpu_check: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_warm: bool,
    way: str,
    outcome: str,
    reason: str,
    traceback: str,
    last_words: str,
) -> None:
    monkeypatch.setenv("WAY", way)
    check = gpu_check.Check(name="own", module="own_checks", limit_s=60)
    result = runner(gpu_check, is_warm=is_warm).run(check, "cpu", 60)
    assert (result.outcome, result.reason) == (outcome, reason)
    assert result.traceback.endswith(traceback)
    assert result.log.endswith(last_words)


def test_a_check_that_hangs_is_killed_with_all_that_it_started(
    gpu_check: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAY", "hangs")
    result = runner(gpu_check).run(gpu_check.Check(name="own", module="own_checks", limit_s=6), "cpu", 6)
    assert (result.outcome, result.reason, result.log) == ("failed", "did not end within 6 s", "about to wait")
    assert _is_gone(int((folder / "pid").read_text()))


def _is_gone(pid: int) -> bool:
    """A killed process may need a moment to die: wait for exactly that."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


def test_all_are_tried_and_what_has_no_time_or_no_gpu_is_skipped(
    gpu_check: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAY", "fails")
    checks = [gpu_check.Check(name=name, module="own_checks", limit_s=60) for name in ("one", "two")]
    large = gpu_check.Check(name="large", module="own_checks", limit_s=60, gpu_only="so large a model")
    results = list(runner(gpu_check, is_warm=False).run_all([*checks, large]))
    assert [result.outcome for result in results] == ["failed", "failed", "skipped"]
    assert results[-1].reason == "so large a model needs a GPU"
    late = runner(gpu_check, is_warm=False, budget_s=0).run_all(checks)
    assert [result.reason for result in late] == ["no time is left of 0 s"] * 2


def test_a_figure_is_there_before_its_check_has_ended(gpu_check: ModuleType, tmp_path: Path) -> None:
    from gpu_checks.one_check import write
    from gpu_checks.report import Report

    path, found = tmp_path / "result.json", {"figures": {}}
    report = Report(figures=found["figures"], on_figure=lambda: write(path, found))
    report.note(tokens_per_s=3.0)
    report.attempt("kernel", lambda: 1 / 0)
    assert json.loads(path.read_text())["figures"] == {
        "tokens_per_s": 3.0,
        "kernel": "no (ZeroDivisionError: division by zero)",
    }


def test_what_pyproject_asks_for_and_is_absent_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    packaging = importlib.import_module("packaging").__file__
    assert packaging is not None
    (tmp_path / "site" / "packaging").symlink_to(Path(packaging).parent)
    ended = subprocess.run(
        [sys.executable, "-S", BENCHMARKS / "gpu_check.py", "--device", "cpu", "--json", tmp_path / "found.json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    first, *others = ended.stdout.splitlines()
    assert first.startswith("not installed: torch, megatron-core,")
    assert [line.split()[0] for line in others] == ["environment"]  # nothing else is tried
    assert json.loads((tmp_path / "found.json").read_text())["environment.outcome"] == "skipped"


def test_the_result_is_one_flat_object(gpu_check: ModuleType, tmp_path: Path) -> None:
    results = [
        gpu_check.Result(name="learn small", outcome="ok", seconds=1.234, figures={"mfu": 0.5, "kernel": "k"}),
        gpu_check.Result(name="run", outcome="failed", seconds=2.0, reason="why", traceback="where", log="last words"),
    ]
    gpu_check.write(tmp_path / "folder" / "found.json", results)
    assert json.loads((tmp_path / "folder" / "found.json").read_text()) == {
        "learn_small.outcome": "ok",
        "learn_small.seconds": 1.23,
        "learn_small.mfu": 0.5,
        "learn_small.kernel": "k",
        "run.outcome": "failed",
        "run.seconds": 2.0,
        "run.reason": "why",
        "run.traceback": "where",
        "run.log": "last words",
    }
    assert "mfu = 0.5" in "\n".join(gpu_check.lines_of(results[0]))
    assert list(gpu_check.lines_of(results[1]))[-2:] == ["    | where", "    | last words"]


@pytest.mark.slow  # `make gpu-check` is a part of CI
def test_the_script_runs_real_checks_without_being_installed(tmp_path: Path) -> None:
    command = [
        BENCHMARKS / "gpu_check.py",
        "--device",
        "cpu",
        "--only",
        "environment",
        "packing",
        "weight gradients",
        "--json",
        tmp_path / "a" / "b",
    ]
    ended = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "a" / "b").read_text())
    assert (found["environment.device"], found["packing.outcome"]) == ("cpu", "ok")
    assert found["weight_gradients.distance"] < 1e-6  # what a CPU computes in float32
    assert found["packing.gradients_float32"] < found["packing.gradients_bfloat16"]
    assert ended.stdout.endswith("nothing failed\n")


def test_every_check_exists(gpu_check: ModuleType) -> None:
    for module in {check.module for check in gpu_check.CHECKS}:
        source = (BENCHMARKS / Path(*module.split("."))).with_suffix(".py").read_text()
        names = [check.name for check in gpu_check.CHECKS if check.module == module]
        assert all(f'"{name}":' in source for name in names)
