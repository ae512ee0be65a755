"""Presets and files of objectives: all that we ship load, and a mistake is told by name."""

from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from learner.objective import load_objective, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert load_objective(name).policy_loss.anchor == "behaviour"


def test_the_default_is_behaviour_anchored_cispo_within_a_trust_region() -> None:
    objective = load_objective("async_default")
    assert objective.advantages.scale == "none"
    loss = objective.policy_loss.model_dump()
    assert loss["surrogate"] == {"type": "cispo", "cap": 5.0, "floor": 0.0}
    assert loss["trust_mask"] == {"type": "tv", "high": 0.2, "low": 0.2}
    assert loss["veto"] == {"min_ratio": 1e-4}
    assert loss["aggregation"] == {"type": "token_mean"}
    assert loss["kl"]["coefficient"] == 0


def test_a_file_is_an_objective_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("policy_loss: {surrogate: reinforce}")
    assert load_objective(str(path)).policy_loss.surrogate.type == "reinforce"


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no preset 'dr_gropo'; did you mean 'dr_grpo'"):
        load_objective("dr_gropo")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("policy_loss: {surrogate: gspo}", "policy_loss.surrogate"),
        ("policy_los: {}", "policy_los"),
        ("policy_loss: {kl: {coefficient: 0.1}}", "needs a reference model"),
        ("policy_loss: {entropy_coefficient: 0.1}", "entropy_coefficient needs"),
        ("policy_loss: [", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_objective(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_objective(str(tmp_path / "absent.yaml"))
