"""Which environment a task index belongs to while the mix changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.board.environment_mix import PERIOD, EnvironmentChange, MixSchedule, apportion, interleave
from async_rl.cli.buffer import find
from async_rl.cli.env import CHANGES
from async_rl.cli.grammar import read
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError, FleetMismatch
from async_rl.types import MixChange

BASE = (EnvironmentConfig(type="math", weight=3), EnvironmentConfig(type="games"))
Logs = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from("ab"), st.sampled_from([0, 0.5, 2.0, 9.0]), st.integers(0, 90)), max_size=6
)


def entry(at: int, change: EnvironmentChange) -> MixChange:
    return MixChange(at=at, id=f"{at}", change=change.model_dump_json(exclude_defaults=True))


def weighted(at: int, name: str, weight: float, ramp: int = 0) -> MixChange:
    return entry(at, EnvironmentChange(name=name, weight=weight, ramp=ramp, environment=EnvironmentConfig(type=name)))


def drawn(schedule: MixSchedule, count: int) -> list[tuple[str, int]]:
    return [(place.environment, place.index) for place in map(schedule.place, range(count))]


def counted(schedule: MixSchedule, first: int, end: int) -> Counter[str]:
    return Counter(schedule.place(index).environment for index in range(first, end))


def test_weights_are_met_exactly_and_evenly():
    environments = [name for name, _ in drawn(MixSchedule(BASE), 2 * PERIOD)]
    assert Counter(environments) == {"math": 3 * PERIOD // 2, "games": PERIOD // 2}
    for start in range(0, len(environments), 4):
        assert Counter(environments[start : start + 4]) == {"math": 3, "games": 1}


def test_an_attached_environment_begins_where_its_change_says():
    schedule = MixSchedule(BASE, [weighted(1000, "logic", 4)])
    assert drawn(schedule, 1000) == drawn(MixSchedule(BASE), 1000)
    assert counted(schedule, 1000, 1800) == {"math": 300, "games": 100, "logic": 400}


def test_a_detached_environment_leaves_and_its_stream_goes_on_when_it_returns():
    gone, back = weighted(100, "games", 0), weighted(200, "games", 1)
    schedule = MixSchedule(BASE, [gone, back])
    assert counted(schedule, 100, 200) == {"math": 100}
    assert [index for name, index in drawn(schedule, 400) if name == "games"] == list(range(75))


def test_a_ramp_leads_evenly_from_one_weight_to_the_other():
    schedule = MixSchedule(BASE, [weighted(0, "logic", 4, ramp=1600)])
    quarters = [counted(schedule, first, first + 400)["logic"] / 400 for first in range(0, 1600, 400)]
    assert quarters == sorted(quarters)
    assert quarters == pytest.approx([0.1, 0.27, 0.38, 0.46], abs=0.02)
    assert schedule.weights_at(1600) == {"math": 3, "games": 1, "logic": 4}
    assert schedule.weights_at(0)["logic"] < 0.2


def test_a_change_in_the_middle_of_a_ramp_goes_on_from_there():
    up, down = weighted(0, "logic", 8, ramp=1000), weighted(500, "logic", 0, ramp=100)
    schedule = MixSchedule(BASE, [up, down])
    assert 3.5 < schedule.weights_at(499)["logic"] < 4.5
    assert 3.5 < schedule.weights_at(500)["logic"] < 4.5
    assert "logic" not in schedule.weights_at(600)
    assert schedule.final_weights == {"math": 3, "games": 1}


@settings(max_examples=40)
@given(Logs)
def test_no_change_ever_alters_an_earlier_task_and_no_stream_has_gaps(changes: list[tuple[int, str, float, int]]):
    log = [weighted(at, name, weight, ramp) for at, name, weight, ramp in sorted(changes, key=lambda change: change[0])]
    whole = drawn(MixSchedule(BASE, log), 500)
    for heard, change in enumerate(log):
        assert drawn(MixSchedule(BASE, log[:heard]), change.at) == whole[: change.at]
    for name in ("math", "games", "a", "b"):
        stream = [index for environment, index in whole if environment == name]
        assert stream == list(range(len(stream)))


def test_a_log_that_empties_the_mix_is_not_obeyed():
    schedule = MixSchedule(BASE[:1], [weighted(10, "math", 0)])
    assert counted(schedule, 0, 30) == {"math": 30}


def test_environments_that_are_only_evaluated_pose_nothing():
    extra = EnvironmentConfig(type="exam", evaluation_only=True)
    assert set(counted(MixSchedule([*BASE, extra]), 0, 100)) == {"math", "games"}
    with pytest.raises(ConfigError, match="nothing to train on"):
        MixSchedule([extra])


def test_a_change_that_nobody_here_understands_is_one_sentence():
    with pytest.raises(FleetMismatch, match="cannot be read here: 'rubbish'"):
        MixSchedule(BASE, [MixChange(at=0, id="0", change="rubbish")])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("env attach math", "math is in the mix already; `async-rl env weight math WEIGHT`"),
        ("env attach logic --args x=1", "--args must be a JSON object"),
        ("env attach logic --args 7", "--args: Input should be a valid dict"),
        ("env attach logic --max-share 2", "--max-share: Input should be less than or equal to 1"),
        ("env attach logic --weight 0", "a weight must be above 0; `async-rl env detach logic`"),
        ("env attach logic --name a/b", "name 'a/b': String should match"),
        ("env attach x --name games", "games was another environment in this run (games, {}): give this one a --name"),
        ("env weight gams 2", "gams is not in the mix; did you mean games?; it consists of math, games"),
        ("env weight games much", "the weight of games must be a number, not 'much'"),
        ("env weight games nan", "weight nan: Input should be a finite number"),
        ("env weight games 1 --ramp -1", "ramp -1: Input should be greater than or equal to 0"),
        ("env weight games", "env weight needs NAME WEIGHT: async-rl env weight NAME WEIGHT @ run/config.yaml"),
        ("env detach", "env detach needs NAME"),
    ],
)
def test_a_mistake_is_one_sentence(line: str, sentence: str):
    with pytest.raises(ConfigError) as caught:
        changed(line, MixSchedule(BASE))
    assert sentence in str(caught.value)


def test_the_last_one_stays():
    with pytest.raises(ConfigError, match="math is the last environment"):
        changed("env detach math", MixSchedule(BASE, [weighted(5, "games", 0)]))


def test_an_environment_comes_back_under_its_name_without_being_described_again():
    args = json.dumps({"x": 1})
    first = changed(f"env attach logic --args {args.replace(' ', '')} --weight 2 --ramp 10", MixSchedule(BASE))
    assert first.environment == EnvironmentConfig(type="logic", args={"x": 1})
    log = [entry(0, first), weighted(7, "logic", 0)]
    assert changed('env attach logic --args {"x":1}', MixSchedule(BASE, log)) == EnvironmentChange(name="logic", weight=1)


def changed(line: str, schedule: MixSchedule) -> EnvironmentChange:
    understood = read(*find(line.split()))
    return CHANGES[understood.verb.words](understood, schedule)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_shares_are_whole_complete_and_close(weights: list[float]):
    shares = apportion(weights, 1000)
    assert sum(shares) == 1000
    assert min(shares) >= 1
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - max(1, weight / sum(weights) * 1000)) <= len(weights)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_places_are_spread_evenly(shares: Sequence[int]):
    places = interleave(shares)
    taken = [0] * len(shares)
    for position, (who, turn) in enumerate(places, start=1):
        assert turn == taken[who]
        taken[who] += 1
        for other, share in enumerate(shares):
            assert abs(taken[other] - share * position / len(places)) < len(shares)


def test_more_environments_than_places_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        apportion([1.0] * 3, 2)
