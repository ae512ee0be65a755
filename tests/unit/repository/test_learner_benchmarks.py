"""benchmarks/packing.py and benchmarks/learner_step.py measure the real thing, and fill every figure."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"


def figures_of(script: str, result: Path, *flags: str) -> dict[str, float]:
    command = [sys.executable, BENCHMARKS / script, "--rounds=1", *flags, "--json", result]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    return json.loads(result.read_text())


def test_every_packer_is_judged_by_the_same_measures(tmp_path: Path) -> None:
    found = figures_of("packing.py", tmp_path / "packing.json", "--no-rival", "--counts=64", "--shards=8")
    for side in ("ours", "next_fit", "first_fit_decreasing", "best_fit_decreasing", "karmarkar_karp"):
        assert found[f"{side}_uniform_64_dp8_lock_step"] >= found[f"{side}_uniform_64_dp8_cost"] >= 1
    assert found["ours_uniform_64_dp8_over_capacity"] == 0
    assert found["ours_uniform_64_dp8_lock_step"] < found["best_fit_decreasing_uniform_64_dp8_lock_step"]
    assert found["ours_materialise_mtok_s"] > 0


def test_a_step_is_taken_apart_without_remainder(tmp_path: Path) -> None:
    found = figures_of("learner_step.py", tmp_path / "step.json", "--rollouts=8", "--median-tokens=16", "--steps=0")
    phases = ("pack", "ship", "rows", "forward", "loss", "backward", "optimizer", "weights")
    assert all(found[f"{phase}_ms"] > 0 for phase in phases)
    assert abs(sum(found[f"{phase}_ms"] for phase in phases) - found["step_ms"]) < 1e-6 * found["step_ms"]
    assert found["packed_vs_padded"] > 0


BURN = """
import subprocess, sys, time
while time.process_time() < 0.5: pass
if "learner" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "a server"], stdin=sys.stdin, stdout=subprocess.PIPE)
    child.stdout.readline()
print("burnt", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_cpu_time_is_that_of_a_run_s_processes_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cpu_time = importlib.import_module("learner_parts.cpu_time")
    command = [sys.executable, "-c", BURN, "learner", BURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        found = cpu_time.cpu_seconds(run.pid)
        assert set(cpu_time.cpu_seconds(os.getpid())) >= {"learner", "others"}
        run.communicate()
    assert set(found) == {"learner", "others"}
    assert min(found.values()) >= 0.4
