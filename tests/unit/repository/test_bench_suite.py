"""`make bench`: one table of what the benchmarks found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.repository import ROOT


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("suite")


def test_a_row_has_ours_and_the_ratios_that_the_benchmark_found(suite: ModuleType) -> None:
    figures = {"round_trip_2k_per_s": 900.0, "reverb_2k_per_s": 300.0, "round_trip_2k_vs_reverb": 2.9}
    _, first, second = suite.table({"buffer_speed": figures})
    assert first.split("  ")[0] == "buffer: rollouts of 2,048 tokens, 1/s"
    assert "2.9 x Reverb (300)" in first, "the median of ratios, not the ratio of medians"
    assert first.endswith("- x raw Redis"), "the limit was not measured"
    assert second.endswith("- x raw Redis")


def test_a_ratio_that_no_benchmark_gives_is_that_of_the_figures(suite: ModuleType) -> None:
    _, row = suite.table({"engine_host": {"decode_ms_64": 1.0, "linear_ms_64": 0.02}})[:2]
    assert row.endswith("50 x nn.Linear (0.02)")


def test_a_benchmark_that_fails_costs_its_own_rows(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = tmp_path / "works.py"
    works.write_text("import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{\"speed\": 5}')")
    row = suite.Row("speed of it", "speed")
    both = {
        "broken": suite.Benchmark((str(tmp_path / "missing.py"),), [row]),
        "works": suite.Benchmark((str(works), "--rounds", "1"), [row]),
    }
    monkeypatch.setattr(suite, "SUITE", both)
    kept = tmp_path / "bench" / "today.json"
    assert suite.run(list(both), kept) == 1
    found = json.loads(kept.read_text())
    assert found["figures"] == {"works": {"speed": 5}}
    assert {"date", "commit", "versions", "machine"} < found.keys()
    shown = capsys.readouterr()
    assert "speed of it" in shown.out
    assert "broken failed; its rows are left out" in shown.err


def test_its_scripts_are_there_and_have_a_section_on_the_page(suite: ModuleType) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for benchmark in suite.SUITE.values():
        assert (ROOT / "benchmarks" / benchmark.words[0]).exists()
        assert f"## {benchmark.words[0]}" in page
