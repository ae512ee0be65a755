"""The guard over made-up steps: when it acts, how far it goes, and how it comes back."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rl.config.learner import GuardConfig
from learner.guard.rule import STARVES, GuardRule, GuardState

GOOD, BETWEEN, BAD = 0.9, 0.52, 0.3
"""Effective sample sizes well inside of a band from 0.5 on, just inside of it, and outside."""


def guard(**config: Any) -> GuardRule:
    settings = {"action": "lower_learning_rate", "min_ess": 0.5, "patience": 2, "recovery": 3} | config
    return GuardRule(config=GuardConfig.model_validate(settings), configured_max_age=4)


def step(ess: float = GOOD, kl: float = 0.0, tokens: float = 10.0) -> dict[str, float]:
    return {"policy/ess": ess, "policy/kl_behave": kl, "policy/tokens": tokens}


def after(watching: GuardRule, sizes: Iterable[float], *, waited: float = 0.5) -> tuple[GuardRule, list[str]]:
    verdicts: list[str] = []
    for size in sizes:
        watching, verdict = watching.after(step(size), waited=waited)
        verdicts.append(verdict)
    return watching, verdicts


@pytest.mark.parametrize(
    ("sizes", "scales"),
    [
        ([BAD, BAD], [1, 0.5]),
        ([BAD, GOOD, BAD, BETWEEN, BAD], [1, 1, 1, 1, 1]),  # patience is for steps in a row
        ([BAD] * 5, [1, 0.5, 0.5, 0.25, 0.25]),  # each act is given time to show
        ([BAD] * 12, [1, 0.5, 0.5, 0.25, 0.25] + [0.2] * 7),  # there is a lowest
        ([BAD] * 4 + [GOOD] * 6, [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1]),
        ([BAD] * 2 + [GOOD, GOOD, BETWEEN] * 2, [1] + [0.5] * 7),  # coming back wants more than being inside
        ([GOOD] * 9, [1] * 9),
        ([math.nan, math.nan], [1, 0.5]),
    ],
)
def test_the_learning_rate_follows(sizes: list[float], scales: list[float]) -> None:
    watching, found = guard(lowest_scale=0.2), []
    for size in sizes:
        watching, _ = watching.after(step(size), waited=0.0)
        found.append(watching.learning_rate_scale)
    assert found == scales
    assert watching.max_age == 4


def test_it_reports_only_when_it_acts() -> None:
    _, said = after(guard(lowest_scale=0.5), [BAD] * 6 + [GOOD] * 3)
    assert [bool(each) for each in said] == [False, True, False, False, False, False, False, False, True]
    assert "policy/ess 0.3 is below learner.guard.min_ess 0.5, for 2 steps in a row" in said[1]
    assert "multiplied by 0.5" in said[1]
    assert "multiplied by 1" in said[8]


def bounds(watching: GuardRule, sizes: Iterable[float], *, waited: float = 0.5) -> list[float]:
    found: list[float] = []
    for size in sizes:
        watching, _ = watching.after(step(size), waited=waited)
        found.append(watching.max_age)
    return found


def test_the_bound_on_age_is_halved_and_widened_by_one() -> None:
    config = guard(action="tighten_max_age", patience=1, recovery=2).config
    watching = GuardRule(config=config, configured_max_age=8)
    assert bounds(watching, [BAD] * 4 + [GOOD] * 6) == [4, 2, 1, 1, 1, 2, 2, 3, 3, 4]
    assert bounds(watching, [BAD] + [GOOD] * 20)[-1] == 8, "never above the configured one"
    assert bounds(replace(watching, configured_max_age=2.5), [BAD] * 3 + [GOOD] * 6) == [1, 1, 1, 1, 1.5, 1.5, 2.5, 2.5, 2.5]
    lowest = config.model_copy(update={"lowest_max_age": 3})
    assert bounds(replace(watching, config=lowest), [BAD] * 3 + [GOOD] * 2) == [4, 3, 3, 3, 4]


def test_the_bound_on_age_is_widened_only_for_a_learner_that_waits() -> None:
    watching, _ = after(guard(action="tighten_max_age"), [BAD] * 2)
    assert watching.max_age == 2
    watching, _ = after(watching, [GOOD] * 50, waited=STARVES)
    assert watching.max_age == 2
    watching, _ = after(watching, [GOOD] * 2)
    watching, _ = after(watching, [GOOD] * 50, waited=0.0)
    assert watching.max_age == 2, "steps in which it does not wait say nothing"
    watching, _ = after(watching, [GOOD])
    assert watching.max_age == 3
    scaled, _ = after(guard(), [BAD] * 2)
    scaled, _ = after(scaled, [GOOD] * 3, waited=0.0)
    assert scaled.learning_rate_scale == 1, "the learning rate returns whether the learner waits or not"


def test_the_bound_on_age_is_judged_by_the_oldest_tokens() -> None:
    def ages(**sizes: tuple[float, float]) -> dict[str, float]:
        return {
            f"policy/age_{age}/{name}": value
            for age, (tokens, ess) in sizes.items()
            for name, value in {"tokens": tokens, "ess": ess, "kl_behave": 0.0}.items()
        }

    watching = guard(action="tighten_max_age", patience=1)
    all_good = step(GOOD, tokens=100) | ages(**{"0": (50, GOOD), "2_3": (50, GOOD)})
    for older, max_age in {(6, BAD): 2, (4, BAD): 4, (6, GOOD): 4}.items():
        moved, said = watching.after(all_good | ages(**{"8_up": older}), waited=0.0)
        assert moved.max_age == max_age
        assert ("policy/age_8_up/ess" in said) == (max_age == 2)
    young_is_bad = step(BAD, tokens=100) | ages(**{"0": (50, BAD), "1": (50, GOOD)})
    assert watching.after(young_is_bad, waited=0.0)[0].max_age == 4, "a lower bound would not help"
    assert guard(patience=1).after(young_is_bad, waited=0.0)[0].learning_rate_scale == 0.5


def test_what_is_configured_may_be_below_the_lowest() -> None:
    config = guard(action="tighten_max_age", lowest_max_age=2).config
    watching, verdicts = after(GuardRule(config=config, configured_max_age=0.5), [BAD] * 4)
    assert watching.max_age == 0.5
    assert not any(verdicts)


def test_it_may_end_the_run() -> None:
    _, verdicts = after(guard(action="stop"), [BAD, GOOD, BAD, BAD])
    assert [bool(each) for each in verdicts] == [False, False, False, True]


def test_the_divergence_is_watched_too() -> None:
    watching = guard(min_ess=None, max_kl=0.1, patience=1)
    watching, verdict = watching.after(step(ess=0.01, kl=0.1), waited=0.0)
    assert not verdict
    _, verdict = watching.after(step(kl=0.11), waited=0.0)
    assert "policy/kl_behave 0.11 is above learner.guard.max_kl 0.1" in verdict


def test_a_step_without_tokens_is_ignored() -> None:
    watching, _ = guard().after(step(BAD), waited=0.0)
    assert watching.after(step(0.0, tokens=0.0), waited=0.0) == (watching, "")


def test_by_default_it_does_nothing() -> None:
    watching = GuardRule(config=GuardConfig(), configured_max_age=4)
    assert watching.after(step(0.0, kl=99.0), waited=0.0) == (watching, "")


def test_a_band_is_required_by_name() -> None:
    with pytest.raises(ValidationError, match="action stop needs min_ess or max_kl"):
        GuardConfig(action="stop")


sizes = st.lists(st.sampled_from([GOOD, BETWEEN, BAD, math.nan]), max_size=60)
actions = st.sampled_from(["lower_learning_rate", "tighten_max_age"])


@given(sizes=sizes, action=actions, patience=st.integers(1, 4), recovery=st.integers(1, 4))
def test_it_tightens_by_halves_and_relaxes_by_one_notch_within_its_bounds(
    sizes: list[float], action: str, patience: int, recovery: int
) -> None:
    watching = guard(action=action, patience=patience, recovery=recovery)
    for size in sizes:
        moved, verdict = watching.after(step(size), waited=0.5)
        change = moved.state.notches - watching.state.notches
        assert bool(change) == bool(verdict)
        assert -1 <= change <= (1 if action == "lower_learning_rate" else math.ceil(watching.max_age / 2))
        assert 1 <= moved.max_age <= 4
        assert 0.05 <= moved.learning_rate_scale <= 1
        watching = moved
    watching, _ = after(watching, [GOOD] * 20 * recovery)
    assert (watching.max_age, watching.learning_rate_scale) == (4, 1)


@given(before=sizes, afterwards=sizes, action=actions)
def test_a_resumed_guard_equals_an_uninterrupted_one(before: list[float], afterwards: list[float], action: str) -> None:
    watching, _ = after(guard(action=action), before)
    resumed = GuardRule(config=watching.config, configured_max_age=4, state=GuardState(**asdict(watching.state)))
    assert after(resumed, afterwards) == after(watching, afterwards)
