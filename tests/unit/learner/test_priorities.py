"""What a group's further uses depend on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.types import TakenGroup
from learner.priorities import LEAST, load_priority, weigh_groups
from tests.support.groups import group


def step_batch(*magnitudes: float) -> Any:
    groups = [
        TakenGroup(group=group(f"t{number:09d}", versions=(number,)), version_at_commit=number, version_at_take=4)
        for number in range(len(magnitudes))
    ]
    return SimpleNamespace(groups=groups, packed=SimpleNamespace(magnitudes=magnitudes))


def test_by_advantage_every_group_keeps_a_chance():
    assert weigh_groups(step_batch(0.5, 0.0), load_priority("advantage")) == {"t000000000": 0.5, "t000000001": LEAST}


def test_by_age_the_younger_is_likelier():
    assert weigh_groups(step_batch(1.0, 1.0), load_priority("age")) == {"t000000000": 1 / 5, "t000000001": 1 / 4}


def test_a_user_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        "def twice(taken, advantage): return 2 * advantage\ndef bad(taken, advantage): return -1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert weigh_groups(step_batch(1.5), load_priority("mine:twice")) == {"t000000000": 3.0}
    with pytest.raises(ConfigError, match="weight -1"):
        weigh_groups(step_batch(1.5), load_priority(f"{tmp_path}/mine.py:bad"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("advantages", "choose advantage"),
        ("nowhere:f", "PYTHONPATH"),
        ("math:nothing", r"replay\.priority: math has no 'nothing'"),
    ],
)
def test_an_unknown_priority_is_one_sentence(name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        load_priority(name)
