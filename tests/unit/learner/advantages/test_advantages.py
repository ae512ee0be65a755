"""Rewards to advantages, against numbers worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages.config import GroupAdvantages
from learner.advantages.group import group_advantages, overlong_penalty, whiten_rollouts

REWARDS = [1.0, 0.0, 0.0, 1.0, 2.0, 4.0]
GROUPS = [7, 7, 7, 7, 3, 3]
LENGTHS = [1, 2, 3, 4, 5, 15]
OF_GROUPS = ["group_mean", "leave_one_out", "length_weighted", "runner_up"]
"""Baselines that compare siblings."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "group_mean", "scale": "none"}, [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]),
        ({"baseline": "leave_one_out", "scale": "none"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2.0, 2.0]),
        # (1 + 4) / 10 and (2 * 5 + 4 * 15) / 20
        ({"baseline": "length_weighted", "scale": "none", "lengths": LENGTHS}, [0.5, -0.5, -0.5, 0.5, -1.5, 0.5]),
        ({"baseline": "runner_up", "scale": "none"}, [0, 0, 0, 0, 0, 2.0]),
        ({"baseline": "batch_mean", "scale": "none"}, [r - 8 / 6 for r in REWARDS]),
        ({"baseline": "none", "scale": "none"}, REWARDS),
        # deviations: sqrt(4 * 0.25 / 3) and sqrt(2)
        ({}, [s * 0.5 / (math.sqrt(1 / 3) + 1e-6) for s in (1, -1, -1, 1)] + [s / (math.sqrt(2) + 1e-6) for s in (-1, 1)]),
        ({"unbiased": False, "eps": 0.25}, [0.5 / 0.75, -0.5 / 0.75, -0.5 / 0.75, 0.5 / 0.75, -1 / 1.25, 1 / 1.25]),
        ({"scale": "group_mean"}, [1, -1, -1, 1, -1 / 3, 1 / 3]),
        ({"scale": "batch_std"}, [a / (np.std(REWARDS, ddof=1) + 1e-6) for a in (0.5, -0.5, -0.5, 0.5, -1.0, 1.0)]),
    ],
)
def test_against_hand_computed_numbers(options: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(REWARDS, GROUPS, **options), expected, rtol=1e-12)


@pytest.mark.parametrize("baseline", OF_GROUPS)
@pytest.mark.parametrize("scale", ["group_std", "group_mean", "batch_std", "none"])
def test_groups_without_spread_get_exactly_zero(baseline: Any, scale: Any) -> None:
    # the mean of three 0.1 is not 0.1, and a lone rollout has nobody to be compared with
    rewards, groups = [0.1, 0.1, 0.1, 5.0, 1.0, 3.0], [0, 0, 0, 1, 2, 2]
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale, lengths=[1, 2, 3, 4, 5, 5])
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert found[5] > 0
    assert found[4] == (0 if baseline == "runner_up" else -found[5])


@pytest.mark.parametrize("scale", ["group_std", "group_mean"])
def test_what_is_divided_by_a_statistic_of_its_group_needs_spread_too(scale: Any) -> None:
    found = group_advantages([0.1, 0.1, 5.0, 1.0, 3.0], [0, 0, 1, 2, 2], baseline="none", scale=scale)
    assert found[:3].tolist() == [0, 0, 0]
    assert (found[3:] > 0).all()


def test_a_batch_without_spread_gets_exactly_zero() -> None:
    assert group_advantages([0.1] * 3, [0, 1, 2], baseline="batch_mean", scale="batch_std").tolist() == [0, 0, 0]


def test_a_group_that_never_succeeds_has_no_direction_under_its_mean() -> None:
    assert group_advantages([-1.0, 1.0, -3.0, 2.0], [0, 0, 1, 1], scale="group_mean").tolist() == [0, 0, 0, 0]


def test_the_best_learn_nothing_when_there_are_two_of_them() -> None:
    found = group_advantages([1.0, 3.0, 3.0, 5.0, 2.0], [0, 0, 0, 1, 1], baseline="runner_up", scale="none")
    assert found.tolist() == [0, 0, 0, 3, 0]


@pytest.mark.parametrize("baseline", [*OF_GROUPS, "batch_mean"])
@pytest.mark.parametrize("scale", ["group_std", "group_mean", "batch_std", "none"])
def test_invalid_rollouts_leave_no_trace(baseline: Any, scale: Any) -> None:
    valid = [True, False, True, True, False, True]
    with_invalid = group_advantages(
        [1.0, math.nan, 0.0, 2.0, 1e9, 5.0],
        [0, 0, 0, 1, 1, 1],
        baseline=baseline,
        scale=scale,
        valid=valid,
        lengths=[3, 100, 4, 5, 100, 6],
    )
    without = group_advantages([1.0, 0.0, 2.0, 5.0], [0, 0, 1, 1], baseline=baseline, scale=scale, lengths=[3, 4, 5, 6])
    assert with_invalid[[1, 4]].tolist() == [0, 0]
    np.testing.assert_array_equal(with_invalid[np.array(valid)], without)


@pytest.mark.parametrize("baseline", OF_GROUPS)
def test_one_valid_member_is_a_lone_rollout(baseline: Any) -> None:
    assert group_advantages([3.0, 9.0], [0, 0], baseline=baseline, valid=[True, False], lengths=[1, 1]).tolist() == [0, 0]


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, math.inf], [0, 0])


@pytest.mark.parametrize("baseline", [*OF_GROUPS, "batch_mean", "none"])
def test_nothing_in_nothing_out(baseline: Any) -> None:
    assert group_advantages([], [], baseline=baseline, lengths=[]).shape == (0,)
    assert whiten_rollouts([], []).shape == (0,)


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
    configured = GroupAdvantages().model_dump(exclude={"type", "whiten"})
    np.testing.assert_array_equal(group_advantages(REWARDS, GROUPS), group_advantages(REWARDS, GROUPS, **configured))


# -- whitening -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 9)), min_size=1, max_size=20))
def test_whitening_rollouts_is_whitening_their_tokens(rollouts: list[tuple[float, int]]) -> None:
    advantages, tokens = (np.array(column) for column in zip(*rollouts, strict=True))
    each = np.repeat(advantages, tokens)
    found = np.repeat(whiten_rollouts(advantages, tokens), tokens)
    if len(set(each.tolist())) < 2:
        assert not found.any()
        return
    np.testing.assert_allclose(found, (each - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8), rtol=1e-9, atol=1e-9)


# -- long answers --------------------------------------------------------------------------------------------------------


def test_the_penalty_of_long_answers_begins_at_the_buffer_and_goes_on_beyond_the_limit() -> None:
    found = overlong_penalty([0, 60, 80, 100, 120], max_length=100, buffer=40, factor=2.0)
    np.testing.assert_allclose(found, [0, 0, -1, -2, -3])
