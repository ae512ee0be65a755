"""benchmarks/weights.py pushes for real and fills every figure; what it says of fleets that nobody has follows a formula."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"

QUICK = ("--rounds=1", "--mib=8", "--fleets", "1", "--no-decoding")


@pytest.mark.slow
def test_the_quick_run_fills_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "weights.py", *QUICK, "--json", tmp_path / "result"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "result").read_text())
    for name in ("push_vs_flat_gloo", "same_host_vs_gloo", "same_host_vs_memcpy", "small_tensors_vs_naive"):
        assert found[name] > 0
        assert found[f"{name}_3_processes"] > 0
    assert found["memory_push_ms_1"] > 0
    assert "a model, not a measurement" in run.stdout


SOONER_DONE_THAN_A_PUSH = """
from async_rl.config import WireConfig
from async_rl.supervision.liveness.leaving import leave_at_once
from weights_parts.in_flight import Work, in_flight_figures

if __name__ == "__main__":
    with leave_at_once():
        print(in_flight_figures(1, WireConfig(deltas="off"), Work(batch=1, tokens=2, every_s=0.6))["push_ms"])
"""


def test_decoding_that_ends_sooner_than_a_push_is_repeated_until_there_was_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SOONER_DONE_THAN_A_PUSH)
    run = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": f"{BENCHMARKS}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert float(run.stdout.splitlines()[-1]) > 0


def test_a_straight_line_is_found_and_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fleet_size = importlib.import_module("weights_parts.fleet_size")
    cost = fleet_size.fitted({1: 0.003, 2: 0.004, 8: 0.010})
    assert (cost.fixed_s, cost.per_worker_s) == pytest.approx((0.002, 0.001))
    once = fleet_size.MODEL_GB / fleet_size.SENDERS
    assert cost.push_s(1000, "nccl") == pytest.approx(1.002 + once / fleet_size.LINKS["nccl"])
    assert cost.push_s(7, "gloo") == pytest.approx(0.009 + 3 * once / fleet_size.LINKS["gloo"])
    assert all(math.isfinite(value) for value in cost.figures().values())
