"""What the tree derives from itself."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from async_rl.config import Config


def config(**sections: object) -> Config:
    return Config.model_validate(
        {"model": {"size": {"hidden": 32, "layers": 1, "heads": 2}}, "environments": [{"type": "counting"}]} | sections
    )


def test_slots_are_what_the_age_bound_allows():
    made = config(staleness={"max_age": 3}, batch={"groups_per_step": 8})
    assert made.limits.slots == 32
    assert config(staleness={"max_age": 0}, batch={"groups_per_step": 8}).limits.slots == 8


def test_fleets_agree_by_what_a_folder_says_and_not_by_where_it_lies(tmp_path: Path):
    facts: list[dict[str, str]] = []
    for place, text in (("here", "{}"), ("there", "{}"), ("other", '{"hidden_size": 1}')):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(text)
        facts.append(config(model={"folder": str(tmp_path / place)}).fleet_facts)
    here, there, other = facts
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {"model.folder"}


def test_facts_name_each_value_that_fleets_share():
    changed = config(model={"size": {"hidden": 64, "layers": 1, "heads": 2}}).fleet_facts
    assert [key for key, value in config().fleet_facts.items() if changed[key] != value] == ["model.size.hidden"]


def test_the_socket_of_an_embedded_server_fits_the_systems_limit(tmp_path: Path):
    deep = config(run={"name": "r" * 100, "folder": str(tmp_path / ("f" * 60))})
    assert len(deep.redis_url.removeprefix("unix://")) < 100
    assert deep.redis_url != config(run={"name": "other", "folder": str(tmp_path)}).redis_url


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"environments": [{"type": "counting"}, {"type": "counting"}]}, "different names"),
        ({"leases": {"learner_s": 1.0}}, "two heartbeats"),
        ({"model": {"size": {"hidden": 30, "layers": 1, "heads": 4}}}, "multiple of heads"),
        ({"model": {}}, "exactly one"),
        ({"learner": {"parallel": {"tensor": 2, "processes": 3}}}, "multiple of tensor x pipeline"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(wrong: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=says):
        config(**wrong)
