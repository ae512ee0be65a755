"""benchmarks/scale.py measures a fleet of real clients, and tells the costs of heartbeats, groups and pushes apart."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.page_commands import Command, commands
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale")


def test_costs_are_told_apart(benchmark: ModuleType):
    """A heartbeat costs 100, a group 400, a push 50."""

    def measured(beats: float, groups: float, pushes: float) -> object:
        cost = 100 * beats + 400 * groups + 50 * pushes
        rates = {"beats": beats, "groups": groups, "pushes": pushes, "push_s": 0.1, "workers": 10, "worker_us": 1.0}
        return benchmark.Measured(redis_us=cost, learner_us=cost / 2, calls={}, call_us={}, **rates)

    found = benchmark.model([measured(1, 0.1, 0.2), measured(0.9, 0.4, 0.2), measured(1, 0.1, 0.8)])
    assert found["redis_us_of_a_worker_second"] == pytest.approx(100)
    assert found["redis_us_of_a_group"] == pytest.approx(400)
    assert found["redis_us_of_a_push_to_a_worker"] == pytest.approx(50)
    assert found["learner_us_of_a_group"] == pytest.approx(200)


def test_a_step_has_the_groups_of_the_time_between_pushes(benchmark: ModuleType):
    assert benchmark.Traffic().limits(1000).groups_per_step == 500
    assert benchmark.Traffic(waits=True).limits(1000).slots == 1000, "every worker could have one, and has room for two"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("docs/scale.md"), ids=lambda command: " ".join(command.words[2:]))
def test_a_command_of_the_page_measures_a_small_fleet(command: Command, tmp_path: Path):
    result = tmp_path / "result.json"
    line = re.sub(r"(--workers|--model)( \d+)+", r"\1 20", " ".join(command.words[1:]))
    line = re.sub(r"--stretch \d+", "--stretch 2", line)
    shorter = [] if "--model" in line else ["--seconds", "3"]  # of its traffics one has groups after half a minute only
    words = [sys.executable, *line.split(), *shorter, "--json", result]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert run.returncode == 0, run.stderr
    found = json.loads(result.read_text())
    if "--patterns" not in line:
        assert found["waiting_20_redis_us"] > 0
        assert "reserve" in run.stdout
    if "--model" in line:
        assert {"redis_us_of_a_worker_second", "learner_us_of_a_push_to_a_worker"} <= found.keys()
