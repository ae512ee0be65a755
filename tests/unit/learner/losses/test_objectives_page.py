"""The examples of docs/objectives.md work."""

import re
from pathlib import Path

import pytest
import yaml

from async_rl.config.learner import LearnerConfig
from async_rl.telemetry.table import find_metric
from learner.objective import Objective, load_objective, preset_names
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "objectives.md").read_text()


def shown(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_preset_is_explained() -> None:
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == preset_names()


def test_the_default_is_as_shown() -> None:
    whole, *_ = shown("yaml")
    assert Objective.model_validate(yaml.safe_load(whole)) == load_objective("async_default")


def test_the_loss_of_ones_own_works_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = shown("python")
    (beside,) = (block for block in shown("yaml") if "own_loss" in block)
    Path("my_losses.py").write_text(code)
    Path("mine.yaml").write_text(beside)
    for name in ("my_losses.py:my_loss", "mine.yaml"):
        objective = load_objective(name)
        assert objective.own_loss is not None
        assert objective.own_loss.takes == {"current", "behaviour", "advantages", "mask", "normaliser"}


def test_the_guard_is_set_as_shown() -> None:
    (block,) = (block for block in shown("yaml") if "guard" in block)
    assert LearnerConfig.model_validate(yaml.safe_load(block)["learner"]).guard.action == "lower_learning_rate"


@pytest.mark.parametrize("word", re.findall(r"`(policy/[a-z_/0-9]+|optim/\w+)`", PAGE))
def test_the_metrics_exist(word: str) -> None:
    assert find_metric(word) is not None
