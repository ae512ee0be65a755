"""Rewards to advantages, against numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import AdvantageConfig, group_advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 2.0, 4.0]
GROUPS = [7, 7, 7, 7, 3, 3]
ALL = [1.0, 0.0, 0.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "group_mean", "scale": "none"}, [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]),
        ({"baseline": "leave_one_out", "scale": "none"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2.0, 2.0]),
        ({"baseline": "batch_mean", "scale": "none"}, [r - 8 / 6 for r in REWARDS]),
        ({"baseline": "none", "scale": "none"}, REWARDS),
        # deviations: sqrt(4 * 0.25 / 3) and sqrt(2)
        ({}, [s * 0.5 / (math.sqrt(1 / 3) + 1e-6) for s in (1, -1, -1, 1)] + [s / (math.sqrt(2) + 1e-6) for s in (-1, 1)]),
        ({"unbiased": False, "eps": 0.25}, [0.5 / 0.75, -0.5 / 0.75, -0.5 / 0.75, 0.5 / 0.75, -1 / 1.25, 1 / 1.25]),
    ],
)
def test_against_hand_computed_numbers(options: dict[str, object], expected: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(REWARDS, GROUPS, **options), expected, rtol=1e-12)


def test_batch_deviation_is_that_of_all_rewards() -> None:
    found = group_advantages(REWARDS, GROUPS, scale="batch_std")
    np.testing.assert_allclose(found, np.array([0.5, -0.5, -0.5, 0.5, -1.0, 1.0]) / (np.std(ALL, ddof=1) + 1e-6))


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_groups_without_spread_get_exactly_zero(baseline: str, scale: str) -> None:
    # the mean of three 0.1 is not 0.1, and a lone rollout has nobody to be compared with
    rewards, groups = [0.1, 0.1, 0.1, 5.0, 1.0, 3.0], [0, 0, 0, 1, 2, 2]
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert found[5] == -found[4] > 0


def test_a_batch_without_spread_gets_exactly_zero() -> None:
    assert group_advantages([0.1] * 3, [0, 1, 2], baseline="batch_mean", scale="batch_std").tolist() == [0, 0, 0]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_invalid_rollouts_leave_no_trace(baseline: str, scale: str) -> None:
    valid = [True, False, True, True, False, True]
    with_invalid = group_advantages(
        [1.0, math.nan, 0.0, 2.0, 1e9, 5.0], [0, 0, 0, 1, 1, 1], baseline=baseline, scale=scale, valid=valid
    )
    without = group_advantages([1.0, 0.0, 2.0, 5.0], [0, 0, 1, 1], baseline=baseline, scale=scale)
    assert with_invalid[[1, 4]].tolist() == [0, 0]
    np.testing.assert_array_equal(with_invalid[np.array(valid)], without)


def test_one_valid_member_is_a_lone_rollout() -> None:
    assert group_advantages([3.0, 9.0], [0, 0], valid=[True, False]).tolist() == [0, 0]


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, math.inf], [0, 0])


def test_nothing_in_nothing_out() -> None:
    assert group_advantages([], []).shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=30))
def test_groups_do_not_see_each_other(rollouts: list[tuple[int, float]]) -> None:
    groups, rewards = (list(column) for column in zip(*rollouts, strict=True))
    together = group_advantages(rewards, groups)
    for group in set(groups):
        members = [index for index, each in enumerate(groups) if each == group]
        alone = group_advantages([rewards[index] for index in members], [0] * len(members))
        np.testing.assert_allclose(together[members], alone, atol=1e-12)
        assert abs(together[members].sum()) < 1e-6


def test_the_defaults_of_config_and_function_agree() -> None:
    np.testing.assert_array_equal(
        group_advantages(REWARDS, GROUPS), group_advantages(REWARDS, GROUPS, **AdvantageConfig().model_dump())
    )
