"""benchmarks/buffer_speed.py measures the real buffer, compares within a round, and continues without an absent rival."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("buffer_speed")


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("buffer_parts.rival")


@pytest.mark.slow
def test_the_quick_run_fills_every_figure(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, BENCHMARKS / "buffer_speed.py", "--quick", "--rounds=1", "--rivals=pickle_stream"]
    run = subprocess.run([*command, "--json", result], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    found = json.loads(result.read_text())
    measured = {name for name, value in found.items() if value is not None}
    transport = {f"{side}_{size}_per_s" for side in ("round_trip", "redis_limit", "pickle_stream") for size in ("2k", "16k")}
    assert transport | {"codec_encode_4k_us", "codec_decode_4k_us", "script_max_ms", "flat_groups", "flat_writers"} <= measured
    assert {f"script_{name}_max_ms" for name in ("reserve", "commit", "take", "recover", "roll_again", "readmit")} <= measured
    assert "not measured" not in run.stdout


def test_ratios_are_compared_within_a_round(benchmark: ModuleType) -> None:
    """A machine that becomes ten times slower after the first round changes the rates, not the ratio."""
    rounds = [
        benchmark._compared("reverb", "2k", ours, theirs) for ours, theirs in ((900.0, 300.0), (90.0, 30.0), (40.0, 20.0))
    ]
    assert benchmark.medians(rounds) == {"reverb_2k_per_s": 30.0, "round_trip_2k_vs_reverb": 3.0}


def test_a_rival_that_fails_once_has_no_figure(benchmark: ModuleType) -> None:
    rounds = [benchmark._compared("reverb", "2k", 900.0, theirs) for theirs in (300.0, None)]
    assert benchmark.medians(rounds) == {"reverb_2k_per_s": None, "round_trip_2k_vs_reverb": None}


def test_a_broken_rival_is_named_with_its_last_words(
    benchmark: ModuleType, rival: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('nothing to load it with')")
    broken = rival.Rival(name="broken", script=str(script), environment=None)
    with pytest.raises(rival.Absent, match="broken failed: nothing to load it with"):
        rival.rival_per_s(broken, 2048, 64)


@pytest.mark.parametrize(("option", "value"), [("--rivals", "reverb,nobody"), ("--parts", "codek"), ("--rounds", "0")])
def test_what_is_not_there_cannot_be_chosen(
    benchmark: ModuleType, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_args([option, value])
    assert option in capsys.readouterr().err


def test_no_rivals_means_none(benchmark: ModuleType) -> None:
    assert benchmark.parse_args(["--rivals", "none"]).rivals == []
    assert [rival.name for rival in benchmark.parse_args(["--rivals", "ray_queue,reverb"]).rivals] == ["reverb", "ray_queue"]
