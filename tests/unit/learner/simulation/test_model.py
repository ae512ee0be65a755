"""The simulation keeps to what is known without it: rates of the slower side, Little's law, the bound on age."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from learner.simulation.model import SimulatedStep, Simulation
from learner.simulation.world import SimulatedWorld
from learner.versions.push_policy import PushPolicy

EVEN = SimulatedWorld(work=lambda _: 1.0, learner_varies=0.0, push_s=0.0)


def steady(world: SimulatedWorld, pace: float | None = None) -> list[SimulatedStep]:
    return Simulation(world, 1, pace).run(120)[40:]


def step_s(steps: list[SimulatedStep]) -> float:
    return (steps[-1].ended - steps[0].ended) / (len(steps) - 1)


def test_a_step_takes_what_the_slower_side_takes():
    learner_bound = replace(EVEN, learner_s=1.0, group_s=0.1)
    assert step_s(steady(learner_bound)) == pytest.approx(1.0)
    production_bound = replace(EVEN, learner_s=0.01, group_s=0.4, workers=2)
    assert step_s(steady(production_bound, pace=99)) == pytest.approx(8 * 0.4 / 2, rel=0.02)


@pytest.mark.parametrize("pace", [2, 3.5, 6])
def test_while_slots_bind_the_mean_age_is_the_pace_minus_1(pace: float):
    ages = [age for step in steady(replace(EVEN, learner_s=1.0), pace) for age in step.ages]
    assert fmean(ages) == pytest.approx(pace - 1, abs=0.02)


def test_larger_batches_gain_as_much_as_decoding_alone_costs():
    """Eight groups at once take alone_s + 8 x group_s, one after the other 8 x (alone_s + group_s)."""
    batching = replace(EVEN, learner_s=0.001, alone_s=0.4, group_s=0.05, workers=1)
    assert step_s(steady(replace(batching, groups_per_worker=8), 99)) == pytest.approx(0.4 + 8 * 0.05, rel=0.02)
    assert step_s(steady(replace(batching, groups_per_worker=1), 99)) == pytest.approx(8 * 0.45, rel=0.02)


def test_groups_without_signal_are_rolled_out_for_nothing():
    lossy = replace(EVEN, learner_s=0.01, group_s=0.4, workers=2)
    assert step_s(steady(replace(lossy, dropped=0.5), 99)) == pytest.approx(2 * step_s(steady(lossy, 99)), rel=0.1)


def test_a_push_that_takes_longer_than_a_step_skips_versions_and_keeps_the_bound():
    steps = steady(replace(EVEN, learner_s=0.1, group_s=0.01, push_s=0.35))
    pushed = steps[-1].totals.pushes - steps[0].totals.pushes
    assert pushed < 0.4 * len(steps)
    assert max(max(step.ages) for step in steps) <= EVEN.max_age
    assert step_s(steps) == pytest.approx(0.1, rel=0.02), "the pace makes room for what is not released"


def test_versions_are_held_back_as_the_policy_says():
    steps = steady(replace(EVEN, pushes=PushPolicy(every_steps=4, max_steps=9), lowest_pace=5.0))
    assert steps[-1].totals.pushes - steps[0].totals.pushes == pytest.approx((len(steps) - 1) / 4, abs=1)


def test_a_version_held_back_for_ever_is_offered_by_a_learner_that_waits():
    assert len(steady(replace(EVEN, pushes=PushPolicy(every_s=1e9, max_steps=99)), 3)) == 80


def test_processes_that_share_cores_slow_each_other_down():
    shared = replace(EVEN, learner_s=0.5, group_s=0.1, workers=2, cores=1)
    assert step_s(steady(shared)) == pytest.approx(0.5 + 8 * 0.1, rel=0.02)
