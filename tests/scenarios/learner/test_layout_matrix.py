"""Every combination of divisions that runs without a GPU trains the model that one process trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.ranks.rank_group import RankGroup
from tests.scenarios.learner.layout_matrix import (
    CASES,
    DENSE,
    EXPERTS,
    FEW,
    MODELS,
    OBJECTIVE,
    PROCESSES,
    STEPS,
    capacity_of,
    shape_of,
)
from tests.support.full_weights import weights_of
from tests.support.learner_rank import config, train
from tests.support.made_once import made_once
from tests.support.warm_processes import play_ranks

Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def play_matrix(which: str, root: Path) -> None:
    play_ranks("tests.scenarios.learner.layout_matrix", which, root, ranks=PROCESSES, timeout_s=500)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "layout_matrix", lambda root: play_matrix("few", root))


def alone(model: dict[str, Any], **settings: Any) -> Trained:
    rank_group = RankGroup(config(**model, **settings), OBJECTIVE, shape_of(model))
    rows, weights = train(rank_group, 1, STEPS, capacity_of(model)), weights_of(rank_group)
    rank_group.stop()
    return rows, weights


@pytest.fixture(scope="module")
def single() -> dict[str, Trained]:
    return {name: alone(model) for name, model in MODELS.items()}


def expect_same(found: Trained, expected: Trained) -> None:
    for name in ("loss", "grad_norm"):  # before rounding has had a step to grow
        assert found[0][0][name] == pytest.approx(expected[0][0][name], rel=1e-5)
    for row, other in zip(found[0], expected[0], strict=True):
        shared = {name: value for name, value in other.items() if not name.startswith("batch/")}
        assert {name: row[name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def check(name: str, root: Path, single: dict[str, Trained]) -> None:
    rows, weights = json.loads((root / name / "rows.json").read_text()), load_file(root / name / "weights.safetensors")
    (of,) = (kind for kind, model in MODELS.items() if model is CASES[name].model)
    expect_same((rows, weights), single[of])


@pytest.mark.parametrize("name", FEW)
def test_losses_gradients_and_weights_are_those_of_one_process(few: Path, single: dict[str, Trained], name: str) -> None:
    check(name, few, single)


@pytest.mark.slow
def test_every_combination(tmp_path: Path, single: dict[str, Trained]) -> None:
    play_matrix("all", tmp_path)
    for name in CASES:
        check(name, tmp_path, single)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_is_recomputed_is_what_was_not_remembered(single: dict[str, Trained], model: Any, recompute: str) -> None:
    expected = single["dense" if model is DENSE else "experts"]
    expect_same(alone(model, recompute=recompute), expected)


def test_half_the_precision_finds_nearly_the_same(single: dict[str, Trained]) -> None:
    rows, weights = alone(DENSE, precision="bfloat16")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for name in ("loss", "grad_norm"):
        assert rows[0][name] == pytest.approx(single["dense"][0][0][name], rel=0.02)
    # the optimizer's own copies are in float32, or small updates would be lost
    for name, tensor in single["dense"][1].items():
        torch.testing.assert_close(weights[name].float(), tensor, atol=0.01, rtol=0.02, msg=name)
