"""pass@k against counting by hand, intervals against what they promise."""

from __future__ import annotations

import random
from itertools import combinations
from math import inf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.telemetry.estimates import estimate_mean, estimate_share, pass_at_k, student_quantile


@given(st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_sample(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 8))
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    drawn = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(fmean(any(choice) for choice in drawn))


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_estimated_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"samples"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.9])
def test_intervals_of_shares_hold_the_truth_as_often_as_they_say(truth: float) -> None:
    chance = random.Random(7)
    held = 0
    for _ in range(1000):
        estimate = estimate_share([float(chance.random() < truth) for _ in range(40)])
        held += estimate.low <= truth <= estimate.high
    assert 920 <= held <= 990


@pytest.mark.parametrize("tasks", [2, 3, 10, 40])
def test_intervals_of_means_hold_the_truth_as_often_as_they_say(tasks: int) -> None:
    chance = random.Random(7)
    held = 0
    for _ in range(1000):
        estimate = estimate_mean([chance.gauss(3.0, 2.0) for _ in range(tasks)])
        held += estimate.low <= 3.0 <= estimate.high
    assert 920 <= held <= 970


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (11, 2.2010), (30, 2.0423), (1000, 1.9623)])
def test_students_quantile_is_that_of_the_tables(degrees: int, t: float) -> None:
    assert student_quantile(degrees) == pytest.approx(t, abs=1e-4)


def test_tasks_that_are_all_right_are_no_certainty() -> None:
    estimate = estimate_share([1.0] * 10)
    assert (estimate.mean, estimate.high) == (1.0, 1.0)
    assert 0.6 < estimate.low < 0.8


def test_one_task_says_nothing_about_how_tasks_differ() -> None:
    estimate = estimate_mean([2.0])
    assert (estimate.mean, estimate.low, estimate.high) == (2.0, -inf, inf)


def test_nothing_is_no_estimate() -> None:
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimate_share([])
