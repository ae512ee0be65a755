"""benchmarks/gpu_bench.py (make gpu-bench) says what it is: a dry run on a CPU is called one and is kept elsewhere."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_bench")


def test_goals_stand_beside_what_was_measured_and_the_largest_gap_is_named(gpu_bench: ModuleType) -> None:
    found = {
        "environment.device": "cuda:0",
        "environment.gpu": "Some GPU",
        "decode_0.6B.batch_64_context_4096_of_copy_bandwidth": 0.8,
        "decode_8B.batch_1_context_512_of_copy_bandwidth": 0.5,
        "train_1.7B_none.mfu": 0.15,
        "swap_0.6B.worst_swap_ms": 3.0,
        "swap_8B.worst_swap_ms": 40.0,
    }
    text = gpu_bench.page(found, "now")
    assert text.startswith("# Measured on Some GPU\n")
    assert "| decoding 0.6B, 64 at 4096 tokens, share of the copy's bandwidth | 0.8 | at least 0.75 |  |" in text
    assert "| decoding 8B, 1 at 512 tokens, share of the copy's bandwidth | 0.5 | at least 0.75 | 1.5 x |" in text
    assert "| training 1.7B, rows of 32k, recompute none, MFU | 0.15 | at least 0.45 | 3 x |" in text
    assert "| training 4B, rows of 32k, recompute full, MFU | not measured | at least 0.45 |  |" in text
    assert "| decoding waits for a swap of 8 B weights, ms at most | 40 | at most 20 | 2 x |" in text
    assert "Worst gap: training 1.7B, rows of 32k, recompute none, MFU, 3 x short." in text
    met = gpu_bench.page({"environment.device": "cuda:0", "swap_8B.worst_swap_ms": 1.0}, "now")
    assert "Every measured goal is met." in met


def test_a_dry_run_is_called_one_and_no_result(gpu_bench: ModuleType) -> None:
    text = gpu_bench.page({"environment.device": "cpu", "gap.mean": 0.1}, "now")
    assert text.startswith("# Dry run on a CPU: no figure means anything\n")
    assert "Worst gap" not in text
    dry, real = (
        [gpu_bench.Result(name="environment", outcome="ok", seconds=1.0, figures={"device": device})]
        for device in ("cpu", "cuda:0")
    )
    assert gpu_bench.folder_of(dry) == ROOT / "runs" / "gpu_bench_dry_run"
    assert gpu_bench.folder_of(real) == ROOT / "benchmarks" / "results"


def test_every_measurement_and_every_figure_of_a_goal_exists(gpu_bench: ModuleType) -> None:
    names = {check.name.replace(" ", "_") for check in gpu_bench.MEASUREMENTS}
    for goal in gpu_bench.GOALS:
        assert goal.figure.rpartition(".")[0] in names, goal.figure
    for check in gpu_bench.MEASUREMENTS:
        module = importlib.import_module(check.module)
        assert check.name in module.CHECKS


def test_all_measurements_fit_the_budget_on_an_h200(gpu_bench: ModuleType) -> None:
    assert all(check.about_s > 0 for check in gpu_bench.MEASUREMENTS)
    assert sum(check.about_s for check in gpu_bench.MEASUREMENTS) <= gpu_bench.BUDGET_S
    assert all(check.about_s <= check.limit_s for check in gpu_bench.MEASUREMENTS)


def test_the_idle_share_is_of_the_stream_that_computes_and_copies_from_the_host_are_no_work(gpu_bench: ModuleType) -> None:
    host_path = importlib.import_module("gpu_bench_parts.host_path")
    trace = [
        (7, "gemm", 0.0, 4.0),
        (7, "overlapping", 3.0, 5.0),
        (7, "Memcpy HtoD (Pageable -> Device)", 5.0, 6.0),
        (7, "gemm", 6.0, 10.0),
        (9, "Memcpy DtoD (Device -> Device)", 0.0, 3.0),  # transport, which hides no gap of training
        (9, "Memcpy DtoH (Device -> Pinned)", 3.0, 10.0),
    ]
    assert host_path.idle_share(host_path.Busy(*each) for each in trace) == pytest.approx(0.1)


@pytest.mark.slow
def test_a_dry_run_makes_all_measurements(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "gpu_bench.py", "--device", "cpu", "--to", tmp_path]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (written,) = tmp_path.glob("*-dry-run-on-a-cpu.md")
    text = written.read_text()
    assert "| tokens/s of uneven lengths over equal ones | not measured |" not in text
    for figure in ("turnover.of_steady_4", "pushes.in_place_throughput_during_pushes", "pushes.in_place_longest_flip_pause_ms"):
        assert f"| `{figure}` | " in text
    assert "| host path: reading and packing hidden behind training | not measured |" not in text
