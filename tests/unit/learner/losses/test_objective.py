"""Files and code as objectives: what they ask of the learner, and mistakes told by name."""

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import load
from async_rl.errors import ConfigError
from learner.objective import Objective, load_objective


def written(tmp_path: Path, content: str, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(content)
    return str(path)


def test_a_file_is_an_objective_too(tmp_path: Path) -> None:
    objective = load_objective(written(tmp_path, "policy_loss: {surrogate: reinforce}"))
    assert objective.policy_loss.surrogate.type == "reinforce"


def test_advantages_without_a_type_are_those_of_groups() -> None:
    objective = Objective.model_validate({"advantages": {"baseline": "leave_one_out"}})
    assert objective.advantages.type == "group"
    assert not objective.learns_from_equal_rewards


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        ({}, set()),
        ({"policy_loss": {"kl": {"coefficient": 0.1}}}, {"reference"}),
        ({"advantages": "returns", "kl_in_reward": 0.1}, {"reference"}),
        ({"policy_loss": {"anchor": "proximal"}}, {"proximal"}),
        ({"policy_loss": {"anchor": "proximal", "proximal_source": "loglinear"}}, set()),
        ({"policy_loss": {"entropy_coefficient": 0.1}}, {"entropy"}),
        ({"advantages": "gae", "value_loss": {}}, {"values"}),
    ],
)
def test_an_objective_says_what_it_needs(content: dict[str, Any], needs: set[str]) -> None:
    objective = Objective.model_validate(content)
    found = {name for name in ("reference", "proximal", "entropy", "values") if getattr(objective, f"needs_{name}")}
    assert found == needs


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        ({}, True),
        ({"advantages": {"baseline": "none"}}, True),
        ({"advantages": {"baseline": "none", "scale": "none"}}, False),
        ({"advantages": {"baseline": "batch_mean", "scale": "batch_std"}}, False),
        ({"advantages": "returns"}, False),
        ({"own_loss": lambda current, advantages: (current * advantages).sum()}, True),
        ({"own_loss": lambda current: current.sum()}, False),
    ],
)
def test_an_objective_says_whether_a_rollout_alone_teaches_nothing(content: dict[str, Any], needs: bool) -> None:
    assert Objective.model_validate(content).needs_siblings is needs


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no preset 'dr_gropo'; did you mean 'dr_grpo'"):
        load_objective("dr_gropo")


def test_a_file_of_code_needs_a_name_in_it() -> None:
    with pytest.raises(ConfigError, match=r"mine\.py holds code; .* mine\.py:NAME"):
        load_objective("mine.py")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("policy_loss: {surrogate: gsop}", r"policy_loss.surrogate \(.*mine.yaml:1\): the type 'gsop' is not one of"),
        ("policy_los: {}", "policy_los .* did you mean policy_loss"),
        ("advantages: {lamb: 0.9, type: gae}", "advantages.lamb .* did you mean advantages.lam"),
        ("advantages: gae", "add `value_loss: {}`"),
        ("value_loss: {}", "only advantages of type gae have one"),
        ("kl_in_reward: 0.1", "set policy_loss.kl.coefficient"),
        ("own_loss: math:sqrt", "own_loss .*: math:sqrt asks for 'x', which is not an argument of losses"),
        ("rewards: {overlong: {max_length: 4, buffer: 5}}", r"rewards.overlong .*: buffer \(5\) must not be above max_length"),
        ("policy_loss: [", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_objective(path)
    assert str(caught.value).startswith("learner.objective: ")
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_objective(str(tmp_path / "absent.yaml"))


# -- code of one's own ---------------------------------------------------------------------------------------------------

CODE = """
from learner.objective import Objective

def half(current, advantages, mask, normaliser):
    return -(current * advantages * mask).sum() / (2 * normaliser.tokens)

objective = Objective.model_validate({"advantages": {"baseline": "leave_one_out"}, "own_loss": half})
nonsense = 3
"""


def test_code_names_an_objective_or_a_loss(tmp_path: Path) -> None:
    file = written(tmp_path, CODE, "mine.py")
    whole, loss_alone = load_objective(f"{file}:objective"), load_objective(f"{file}:half")
    assert whole.own_loss is not None
    assert loss_alone.own_loss is not None
    assert whole.advantages.model_dump()["baseline"] == "leave_one_out"
    assert loss_alone.advantages == Objective().advantages


def test_a_file_can_put_a_loss_of_ones_own_beside_settings(tmp_path: Path) -> None:
    file = written(tmp_path, CODE, "mine.py")
    objective = load_objective(written(tmp_path, f"advantages: {{scale: none}}\nown_loss: {file}:half"))
    assert objective.own_loss is not None
    assert objective.advantages.model_dump()["scale"] == "none"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("haff", "has no 'haff' .did you mean 'half'"), ("nonsense", "is not a function, but int")],
)
def test_a_mistake_in_a_name_of_code_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    file = written(tmp_path, CODE, "mine.py")
    with pytest.raises(ConfigError, match=sentence):
        load_objective(f"{file}:{name}")


def test_one_cannot_have_both_losses(tmp_path: Path) -> None:
    file = written(tmp_path, CODE, "mine.py")
    with pytest.raises(ConfigError, match="own_loss replaces policy_loss; remove one of them"):
        load_objective(written(tmp_path, f"own_loss: {file}:half\npolicy_loss: {{surrogate: cispo}}"))


def test_code_is_found_from_wherever_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named, seen in (
        ("mine.py:half", f"{tmp_path}/mine.py:half"),
        ("mine.yaml", f"{tmp_path}/mine.yaml"),
        ("mine:half", "mine:half"),
        ("dapo", "dapo"),
    ):
        config = load(["@", "configs/quickstart.yaml", "--learner.objective", named])
        assert config.seen_from_anywhere().learner.objective == seen
