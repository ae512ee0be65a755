"""Figures of a fleet from a simulation of it, and the smallest fleet for a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from async_rl.config import Config
from learner.simulation.model import SimulatedStep, Simulation
from learner.simulation.rates import Rates, fixed_pace, world_of
from learner.simulation.world import SimulatedWorld

SEED = 1
WARM_UP = 24
"""Steps that do not count: the pace is still being found."""
STEPS = 120
FEWEST_STEPS = 16
GROUPS = 40_000
"""Larger steps are simulated fewer, so that an answer takes seconds."""
MOST_WORKERS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What the fleet runs on."""

    cores: int = 0
    """Learner and workers share that many; 0: each worker and the learner have their own."""
    link_gb_s: float = 0.0
    """GB/s of the learner's network; 0: workers read its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    workers: int
    step_s: float
    groups_per_s: float
    """Trained groups a second."""
    rolled_out_per_s: float
    """Groups rolled out a second, those without signal included."""
    tokens_per_s: float
    """Sampled tokens trained a second."""
    age: float
    age_in_flight: float
    age_in_queue: float
    pace: float
    learner_idle: float
    """Share of the time in which the learner waits for groups."""
    workers_idle: float
    """Share of the time in which an engine has nothing to compute."""
    push_s: float
    pushes_per_s: float
    pushing: float
    """Share of the time in which a push is on its way."""
    buffer_bytes: float
    """Most bytes of payloads at once."""

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.step_s


def predict(config: Config, rates: Rates, machines: Machines, *, workers: int) -> Prediction:
    world = world_of(config, rates, workers=workers, cores=machines.cores, link_gb_s=machines.link_gb_s)
    simulated = steady(world, fixed_pace(config))
    first, last, steps = simulated[0], simulated[-1], simulated[1:]
    took, groups = last.ended - first.ended, sum(len(step.ages) for step in steps)
    age, in_queue = (
        fmean(fmean(each) for each in column) for column in zip(*((s.ages, s.in_queue) for s in steps), strict=True)
    )
    kept = (config.learner.checkpoint_every + config.keep_steps) * world.groups_per_step
    return Prediction(
        workers=workers,
        step_s=took / len(steps),
        groups_per_s=groups / took,
        rolled_out_per_s=(last.totals.computed - first.totals.computed) / took,
        tokens_per_s=rates.tokens * groups / took,
        age=age,
        age_in_flight=age - in_queue,
        age_in_queue=in_queue,
        pace=fmean(step.pace for step in steps),
        learner_idle=1 - (last.totals.learner_s - first.totals.learner_s) / took,
        workers_idle=1 - (last.totals.engines_s - first.totals.engines_s) / (took * workers),
        push_s=world.push_s,
        pushes_per_s=(last.totals.pushes - first.totals.pushes) / took,
        pushing=(last.totals.pushing_s - first.totals.pushing_s) / took,
        buffer_bytes=rates.group_bytes * (max(step.held for step in steps) + kept),
    )


def steady(world: SimulatedWorld, pace: float | None) -> Sequence[SimulatedStep]:
    """Simulate, and return the steps after the pace is found."""
    counted = min(STEPS, max(FEWEST_STEPS, GROUPS // world.groups_per_step))
    return Simulation(world, SEED, pace).run(WARM_UP + counted)[WARM_UP:]


def smallest_fleet(config: Config, rates: Rates, machines: Machines, *, steps_per_hour: float) -> Prediction | None:
    """Return the prediction for the fewest workers that reach the rate; None: no fleet does.

    Doubles the fleet until it is enough, or until doubling gains nothing, then halves the interval.
    """

    def predicted(workers: int) -> Prediction:
        return predict(config, rates, machines, workers=workers)

    too_few, enough = 0, predicted(1)
    while enough.steps_per_hour < steps_per_hour:
        if enough.workers >= MOST_WORKERS:
            return None
        too_few, enough = enough.workers, predicted(2 * enough.workers)
    while enough.workers - too_few > 1:
        middle = predicted((too_few + enough.workers) // 2)
        if middle.steps_per_hour >= steps_per_hour:
            enough = middle
        else:
            too_few = middle.workers
    return enough
