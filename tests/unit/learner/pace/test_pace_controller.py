"""The pace that the controller decides, alone and in simulated worlds."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from learner.pace.controller import HELD_BACK_WINDOW, RAISED_BY, WINDOW, PaceController, PaceObservation
from learner.simulation.model import Simulation
from learner.simulation.world import SimulatedWorld
from tests.support.simulated_worlds import FULL, WORLDS, figures, mean_age, with_more_latency

STEPS, SEEDS = 200, (1, 2)


def after(*needs: int, lowest: float = 2.0) -> float:
    """The pace after steps that needed so many groups beside the four of the next step."""
    controller = PaceController(groups_per_step=4, lowest=lowest)
    for need in needs:
        controller = controller.after(PaceObservation(reserved=need, unreleased=0))
    return controller.pace


def test_the_pace_is_what_a_step_needed_in_groups():
    assert after(8) == 3.0
    assert PaceController(groups_per_step=4).after(PaceObservation(reserved=3, unreleased=5)).pace == 3.0


def test_one_step_that_needed_much_more_does_not_count():
    assert after(8, 40, 8, 8) == 3.0
    assert after(8, 40, 40, 8) == 11.0


def test_where_stragglers_hold_the_learner_back_bursts_do_not_count():
    controller = PaceController(groups_per_step=4)
    for reserved in (40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0, 0):
        controller = controller.after(PaceObservation(reserved=reserved, unreleased=0))
    assert controller.pace == 10.0
    for held_back, rolled_out in ((1, 32), (2, 28), (3, 28), (9, 28)):
        held = replace(controller, held_back=(True,) * held_back)
        assert held.pace == 1 + rolled_out / 4, "from the second largest count to the fourth"
    for seen, rolled_out in ((1, 40), (2, 36), (3, 36), (8, 36), (9, 32), (11, 32)):
        early = replace(controller, reserved=controller.reserved[:seen], held_back=(True,) * seen)
        assert early.pace == 1 + rolled_out / 4, "also before there are twelve counts"
    for _ in range(HELD_BACK_WINDOW):
        held = held.after(PaceObservation(reserved=8, unreleased=0))
    assert not any(held.held_back), "what was long ago is forgotten"


def test_the_pace_grows_with_every_step_whose_version_may_offer():
    controller = PaceController(groups_per_step=4)
    for steps in range(1, 6):
        controller = controller.after(PaceObservation(reserved=0, unreleased=4 * steps))
        assert controller.pace == 1 + steps, "there is room for the groups of the next step"


def test_before_a_planned_pause_the_pace_is_raised_and_nothing_is_counted():
    controller = PaceController(groups_per_step=4).after(PaceObservation(reserved=8, unreleased=0))
    for reserved in (8, 12, 16, 16):
        controller = controller.after(PaceObservation(reserved=reserved, unreleased=4, pause_ahead=True))
        assert controller.pace == 4.0 + RAISED_BY
    for _ in range(WINDOW):
        controller = controller.after(PaceObservation(reserved=16 if controller.pause_ahead else 8, unreleased=0))
        assert controller.pace == 3.0


def test_what_was_needed_long_ago_is_forgotten():
    assert after(40, 40, *[8] * WINDOW) == 3.0


def test_the_pace_stays_above_the_lowest():
    assert after() == after(0) == 2.0
    assert after(0, lowest=5.0) == 5.0


@pytest.mark.parametrize(
    ("name", "oldest"),
    {
        "shared cores": 1.1,
        "shared cores, much to roll out": 1.6,
        "workers twice as fast": 1.1,
        "balanced": 2.3,
        "some answers four times as long": 3.0,
        "short tools": 3.8,
        "long tools": 5.3,
        "workers half as fast": 5.0,  # production is the limit: a lower pace would cost as little
    }.items(),
)
def test_groups_are_younger_and_the_run_is_as_fast_as_with_every_slot(name: str, oldest: float):
    world = WORLDS[name]
    full_s, _ = figures(world, FULL, seeds=SEEDS, steps=STEPS)
    took_s, age = figures(world, seeds=SEEDS, steps=STEPS)
    assert took_s <= full_s / 0.95
    assert age <= oldest


@pytest.mark.parametrize("name", ["workers twice as fast", "balanced", "some answers four times as long"])
def test_a_pause_that_was_foreseen_costs_little(name: str):
    every, after_pause = 60, 30

    def run(pace: float | None = None, *, foresees: bool = True) -> tuple[float, float]:
        """Seconds in the steps after pauses, and mean age of all."""
        took, ages = list[float](), list[float]()
        for seed in (*SEEDS, 3):
            steps = Simulation(WORLDS[name], seed, pace, evaluated_every=every, pause_s=0.5, foresees=foresees).run(8 * every)
            pauses = range(2 * every, len(steps) - after_pause, every)
            took.append(sum(steps[pause + after_pause].ended - steps[pause].ended for pause in pauses))
            ages.append(mean_age(steps[every:]))
        return sum(took), mean(ages)

    (full_s, _), (blind_s, blind_age), (took_s, age) = run(pace=99), run(foresees=False), run()
    assert took_s <= min(full_s / 0.97, blind_s / 1.02)
    assert age <= blind_age + 0.3


@pytest.mark.parametrize(
    ("name", "changed"),
    {
        "workers twice as fast": with_more_latency(WORLDS["workers twice as fast"]),
        "balanced": replace(WORLDS["balanced"], workers=2),
        "short tools": replace(WORLDS["short tools"], workers=8),
        "some answers four times as long": replace(WORLDS["some answers four times as long"], learner_s=0.1),
    }.items(),
)
def test_a_world_that_changes_has_its_pace_within_a_window(name: str, changed: SimulatedWorld):
    for seed in SEEDS:
        steps = Simulation(WORLDS[name], seed, changes={STEPS: lambda _: changed}).run(2 * STEPS)
        settled = mean(step.pace for step in steps[STEPS + 60 :])
        soon = mean(step.pace for step in steps[STEPS + WINDOW + 1 : STEPS + WINDOW + 13])
        assert abs(soon - settled) <= max(1.0, 0.25 * settled)
        assert max(max(step.ages) for step in steps) <= changed.max_age
