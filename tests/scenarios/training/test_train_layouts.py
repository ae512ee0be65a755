"""However the ranks are divided, it is the same training: losses, gradients, what is held out, and the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.scenarios.training.train_stage import CASES, Notes, run, trainings
from tests.support.made_once import made_once
from tests.support.small_models import write_folder
from tests.support.warm_processes import play_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout and method, written by two ranks."""

    def make(root: Path) -> None:
        write_folder(root / "teacher", vocabulary=15)  # as many as these trainings have characters
        play_ranks("tests.scenarios.training.train_stage", "every_layout", root)

    return made_once(tmp_path_factory, "train_layouts", make)


@pytest.fixture(scope="module")
def alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Notes, dict[str, torch.Tensor]]]:
    found: dict[str, Any] = {}
    own = tmp_path_factory.mktemp("alone")
    for config in trainings("alone", root / "teacher"):
        found[config.method] = run(config, own / config.method)
    return found


@pytest.mark.parametrize(
    ("layout", "method"), [(layout, method) for layout, methods in CASES.items() for method in methods if layout != "alone"]
)
def test_training_is_that_of_one_process(root: Path, alone: Any, layout: str, method: str) -> None:
    notes, weights = alone[method]
    found = json.loads((root / layout / method / "notes.json").read_text())
    assert len(found["rows"]) == len(notes.rows) == 2
    assert [row["step"] for row in found["examined"]] == [0, 2]
    for row in (found["rows"][0], notes.rows[0], found["examined"][0], notes.examined[0]):
        row.pop("accuracy", None)  # of two models that are the same yet, rounding says which is ahead
    for ours, expected in zip([*found["rows"], *found["examined"]], [*notes.rows, *notes.examined], strict=True):
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-5)
    gathered = load_file(root / layout / method / "weights.safetensors")
    assert gathered.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(gathered[name], tensor, atol=1e-4, rtol=1e-4, msg=name)


def test_the_trainings_clipped(alone: Any) -> None:
    """Else the layouts above would agree about less than they claim to."""
    assert max(row["grad_norm"] for row in alone["sft"][0].rows) > 0.5
