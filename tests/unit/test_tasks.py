"""One number becomes one task: the same everywhere, by weight, without gaps."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.rollout_config import EnvironmentConfig
from async_rl.testing import EchoAgent
from rollout_workers.tasks import PERIOD, TaskMix, WeightedAgent, apportion, interleave


def mix_of(**weights: float) -> TaskMix:
    return TaskMix([WeightedAgent(agent=EchoAgent(name=name), weight=weight) for name, weight in weights.items()])


def test_weights_are_met_exactly_and_evenly():
    mix = mix_of(often=3, rarely=1)
    environments = [mix.draw(index)[1].environment for index in range(2 * PERIOD)]
    assert Counter(environments) == {"often": 3 * PERIOD // 2, "rarely": PERIOD // 2}
    for start in range(0, len(environments), 4):
        assert Counter(environments[start : start + 4]) == {"often": 3, "rarely": 1}


def test_each_environment_sees_its_own_stream_without_gaps():
    mix = mix_of(a=1.0, b=0.37, c=5.2)
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for index in range(2 * PERIOD + 17):
        task = mix.draw(index)[1]
        seen[task.environment].append(int(task.answer))
    for stream in seen.values():
        assert stream == list(range(len(stream)))


def test_a_tiny_weight_is_rare_not_absent():
    mix = mix_of(all=1.0, almost_none=1e-9)
    assert Counter(mix.draw(index)[1].environment for index in range(PERIOD))["almost_none"] == 1


def test_drawing_depends_on_nothing_but_the_index():
    sections = [EnvironmentConfig(type="even_digits", weight=2), EnvironmentConfig(type="counting")]
    here, there = TaskMix.from_config(sections, seed=7), TaskMix.from_config(sections, seed=7)
    backwards = {index: there.draw(index)[1] for index in reversed(range(200))}
    assert [here.draw(index)[1] for index in range(200)] == [backwards[index] for index in range(200)]


def test_another_seed_poses_other_tasks():
    sections = [EnvironmentConfig(type="even_digits")]
    assert TaskMix.from_config(sections, seed=1).draw(0) != TaskMix.from_config(sections, seed=2).draw(0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_shares_are_whole_complete_and_close(weights: list[float]):
    shares = apportion(weights, 1000)
    assert sum(shares) == 1000
    assert min(shares) >= 1
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - max(1, weight / sum(weights) * 1000)) <= len(weights)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_places_are_spread_evenly(shares: list[int]):
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
