"""benchmarks/simulate.py compares predictions with finished rounds, and goes on where it was stopped."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from async_rl.config.loading import load
from tests.support.rated_run import SIBLINGS, record_rates
from tests.support.repository import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("simulate")


def record(benchmark: ModuleType, folder: Path, name: str, number: int) -> None:
    run = folder / benchmark.slug(name, number)
    run.mkdir()
    settings = [f"--{key}={value}" for key, value in benchmark.CASES[name].settings.items()]
    config = ["@", str(ROOT / "configs" / "quickstart.yaml"), "--run.name", "recorded", f"--batch.group_size={SIBLINGS}"]
    record_rates(run, load([*config, *settings]))
    run.with_suffix(".done").touch()


def test_whole_rounds_are_reported_and_not_run_again(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in benchmark.CASES:
        record(benchmark, tmp_path, name, 1)
    record(benchmark, tmp_path, benchmark.BASE, 2)  # a round that was stopped
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--rounds=1", "--folder", str(tmp_path), "--json", str(result)])
    benchmark.main()
    assert "(1 rounds)" in capsys.readouterr().out
    figures = json.loads(result.read_text())
    assert figures["one_worker_step_s"] == pytest.approx(2.0)
    assert {f"{name.replace(' ', '_')}_error" for name in benchmark.CASES} <= figures.keys()
