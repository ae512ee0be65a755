"""However the learner's ranks are divided, it is the same training: losses, gradients, weights, and what a resume finds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.errors import CheckpointError
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of
from tests.support.learner_rank import LAYOUTS, OBJECTIVE, SAVED_AT, STEPS, config, shape, train
from tests.support.made_once import made_once
from tests.support.warm_processes import play_ranks


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout, written by two ranks."""
    return made_once(
        tmp_path_factory, "learner_layouts", lambda root: play_ranks("tests.support.learner_rank", "every_layout", root)
    )


@pytest.fixture
def alone() -> Iterator[RankGroup]:
    rank_group = RankGroup(config(), OBJECTIVE, shape(config()))
    yield rank_group
    rank_group.stop()


@pytest.fixture(scope="module")
def single() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    rank_group = RankGroup(config(), OBJECTIVE, shape(config()))
    rows, weights = train(rank_group, 1, STEPS), weights_of(rank_group)
    rank_group.stop()
    return rows, weights


def result(divided: Path, layout: str) -> dict[str, Any]:
    return json.loads((divided / layout / "result.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_and_metrics_are_those_of_one_process(divided: Path, single: Any, layout: str) -> None:
    for found, expected in zip(result(divided, layout)["rows"], single[0], strict=True):
        shared = {name: value for name, value in expected.items() if not name.startswith("batch/")}
        assert {name: found[name] for name in shared} == pytest.approx(shared, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_become_those_of_one_process(divided: Path, single: Any, layout: str) -> None:
    found = load_file(divided / layout / "weights.safetensors")
    assert found.keys() == single[1].keys()
    for name, tensor in single[1].items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_does_exactly_what_an_uninterrupted_one_does(divided: Path, layout: str) -> None:
    found = result(divided, layout)
    assert found["extra"] == {"version": 12}
    assert found["resumed"] == found["rows"][SAVED_AT:]


@pytest.fixture(scope="module")
def when_saved() -> dict[str, torch.Tensor]:
    rank_group = RankGroup(config(), OBJECTIVE, shape(config()))
    train(rank_group, 1, SAVED_AT)
    weights = weights_of(rank_group)
    rank_group.stop()
    return weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout_loads_as_one_whole_model(
    divided: Path, when_saved: dict[str, torch.Tensor], layout: str
) -> None:
    (checkpoint,) = candidates(divided / layout / "checkpoints")
    found = load_checkpoint(checkpoint, read_manifest(checkpoint), shape(config()), torch.float32)
    assert found.keys() == when_saved.keys()
    for name, tensor in when_saved.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4, msg=name)


def test_a_checkpoint_of_another_model_is_refused(divided: Path) -> None:
    (checkpoint,) = candidates(divided / "tensor" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"belongs to another model: .* expected .*64.* found .*32"):
        load_checkpoint(checkpoint, read_manifest(checkpoint), shape(config(hidden=64)), torch.float32)


def test_the_run_clipped_and_warmed_up(single: Any) -> None:
    """Else the layouts above would agree about less than they claim to."""
    assert [row["lr"] for row in single[0][:2]] == [0.005, 0.01]
    assert single[0][2]["lr"] == 0.01 > single[0][3]["lr"]
    assert max(row["grad_norm"] for row in single[0]) > 0.2
    assert any(row["policy/masked_frac"] > 0 or row["policy/clip_frac"] > 0 for row in single[0])
