"""benchmarks/age_study.py reads rewards without the delay of age, runs no cell twice, and its page shows its data."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_rl.config.loading import load
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("age_study")


@pytest.fixture
def parts(study: ModuleType) -> SimpleNamespace:
    """Return the modules of the study's parts by name."""
    return SimpleNamespace(**{name: importlib.import_module(f"age_parts.{name}") for name in ("cells", "figures", "page")})


def rows(*rewards: float, age: float = 0.0) -> list[dict[str, float]]:
    return [
        {
            "reward/mean": reward,
            "staleness/mean": min(age, step - 1.0),
            "progress/samples": 64.0 * step,
            "progress/wall_s": step / 2,
            "policy/ess": 1.0,
            "policy/clip_frac": 0.25,
            "policy/masked_frac": 0.0,
        }
        for step, reward in enumerate(rewards, start=1)
    ]


def line(cell: str, samples: int | None, **values: Any) -> dict[str, Any]:
    figures = {"wall_s": samples, "final": 0.95, "collapsed": False, "age": 0.0, "bounded": 0.1, "curve": [[0, 0.5]]}
    return {"cell": cell, "samples": samples, **figures, **values}


def test_a_reward_belongs_to_the_policy_that_sampled_it(parts: SimpleNamespace) -> None:
    points = parts.figures.curve_of(rows(0.1, 0.2, 0.3, 0.4, age=2))
    assert [(point.step, point.samples, point.reward) for point in points] == [
        (0, 0, 0.1),
        (0, 0, 0.2),
        (0, 0, 0.3),
        (1, 64, 0.4),
    ]


@pytest.mark.parametrize(
    ("rewards", "index"),
    [((), None), ((1.0,) * 4, None), ((0.9,) * 5, 4), ((0.0, 1.0, 1.0, 1.0, 1.0, 1.0), 5), ((0.89,) * 9, None)],
)
def test_the_target_is_reached_by_a_window(parts: SimpleNamespace, rewards: tuple[float, ...], index: int | None) -> None:
    assert parts.figures.reached(parts.figures.curve_of(rows(*rewards)), parts.cells.TASKS["counting"]) == index


def test_the_result_of_a_run(parts: SimpleNamespace) -> None:
    cell = parts.cells.CELLS[0]
    good = parts.figures.result_of(cell, rows(*(0.1,) * 10, *(1.0,) * 60))
    assert (good["samples"], good["wall_s"], good["final"], good["collapsed"]) == (14 * 64, 7.5, 1.0, False)
    assert len(good["curve"]) <= parts.figures.POINTS
    bad = parts.figures.result_of(cell, rows(*(0.8,) * 10, *(0.1,) * 60))
    assert (bad["samples"], bad["wall_s"], bad["best"], bad["collapsed"]) == (None, None, 0.8, True)


def test_a_run_ends_some_steps_after_the_target(parts: SimpleNamespace) -> None:
    cell = parts.cells.cells_of(["even_digits"], ["grpo"], [8], seeds=[1])[0]
    later = 5 + parts.figures.STEPS_AFTER_TARGET + cell.age
    assert not parts.figures.is_over(cell, rows(*(1.0,) * (later - 1)))
    assert parts.figures.is_over(cell, rows(*(1.0,) * later))
    assert not parts.figures.is_over(cell, rows(*(0.5,) * later))


def test_finished_cells_are_not_run_again_and_an_interrupted_one_leaves_nothing(
    study: ModuleType, parts: SimpleNamespace, tmp_path: Path
) -> None:
    data, begun = tmp_path / "age.jsonl", []

    def run(cell: Any) -> dict[str, Any]:
        begun.append(cell.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return line(cell.name, 64)

    cells = parts.cells.CELLS[:3]
    with pytest.raises(KeyboardInterrupt):
        study.collect(cells, data, minutes=1.0, run=run)
    study.collect(cells, data, minutes=1.0, run=run)
    first, second, third = (cell.name for cell in cells)
    assert begun == [first, second, second, third]
    assert list(parts.page.read(data)) == [first, second, third]


def test_no_cell_begins_after_the_minutes(study: ModuleType, parts: SimpleNamespace, tmp_path: Path) -> None:
    study.collect(parts.cells.CELLS, tmp_path / "age.jsonl", minutes=-1.0, run=pytest.fail)
    assert not (tmp_path / "age.jsonl").exists()


def test_cells_are_chosen_by_their_name_or_its_beginning(study: ModuleType, parts: SimpleNamespace) -> None:
    names = {cell.name for cell in study.selected(["even_digits/*/age64/lr0.001", "counting/grpo/age0/lr0.001/seed1"])}
    assert "even_digits/gspo/age64/lr0.001/seed3" in names
    assert "counting/grpo/age0/lr0.001/seed1" in names
    assert not any("age8/" in name for name in names)
    assert study.selected([]) == parts.cells.CELLS
    with pytest.raises(ValueError, match=r"no cell matches 'even_digits/grpo/age3'; cells are named as in even_digits/"):
        study.selected(["even_digits/*", "even_digits/grpo/age3"])


def test_the_cells_that_are_missing_are_listed(parts: SimpleNamespace, tmp_path: Path) -> None:
    finished, *missing = (cell.name for cell in parts.cells.CELLS)
    (tmp_path / "age.jsonl").write_text(json.dumps(line(finished, 64)) + "\n")
    command = [sys.executable, ROOT / "benchmarks" / "age_study.py", "--list", "--data", tmp_path / "age.jsonl"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.splitlines() == missing


def test_every_kind_of_cell_is_a_valid_run_and_named_once(parts: SimpleNamespace, tmp_path: Path) -> None:
    assert len({cell.name for cell in parts.cells.CELLS}) == len(parts.cells.CELLS)
    for cell in {(cell.task, cell.age, cell.optimizer): cell for cell in parts.cells.CELLS}.values():
        config = load(cell.words(tmp_path))
        assert (config.limits.age_bound, config.staleness.pace, config.learner.steps) == (cell.age, "full", cell.steps)
        assert config.batch.groups_per_step == parts.cells.GROUPS_PER_STEP
        optimizer = config.learner.optimizer
        assert (optimizer.learning_rate, optimizer.betas) == (cell.learning_rate, (0.9, cell.beta2))


def test_the_tables_have_medians_and_extremes(parts: SimpleNamespace) -> None:
    cells = {
        age: [cell.name for cell in parts.cells.cells_of(["counting"], ["grpo"], [age], seeds=[1, 2, 3])] for age in (0, 8)
    }
    samples = {0: (100, 300, 200), 8: (400, None, 500)}
    found = {name: line(name, count) for age, names in cells.items() for name, count in zip(names, samples[age], strict=True)}
    table = parts.page.tables(found).splitlines()
    assert "| `grpo`, lr0.001 | 0 | 3 | 200 (100 to 300) | 1.00 | 200 (100 to 300) | 0.95 | 0 | 0.0 | 10% |" in table
    assert (
        "| `grpo`, lr0.001 | 8 | 3 | 500 (400 to never) | 4.00 (2.50 to never) | 500 (400 to never) | 0.95 | 0 | 0.0 | 10% |"
        in table
    )
    assert table[-1] == f"6 of {len(parts.cells.CELLS)} cells are collected."


def test_the_page_shows_the_data(study: ModuleType, parts: SimpleNamespace) -> None:
    found = parts.page.read(study.DATA)
    assert set(found) <= {cell.name for cell in parts.cells.CELLS}
    assert parts.page.tables(found) in study.PAGE.read_text(), "run: python benchmarks/age_study.py --report"
