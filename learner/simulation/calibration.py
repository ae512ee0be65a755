"""Finds the rates with which the model repeats a recorded run. Pure.

What is recorded of processes that share cores is longer than the work itself, by as much as they were in each other's way. The
model has the same contention, so its rates are those whose simulation shows the recorded times.
"""

from __future__ import annotations

from dataclasses import replace

from learner.simulation.prediction import steady
from learner.simulation.rates import Rates, fixed_pace, world_of
from learner.simulation.recorded import RecordedRun

ROUNDS = 6


def calibrated(run: RecordedRun, *, cores: int) -> Rates:
    """Return rates as they are without other processes."""
    rates = run.rates
    for _ in range(ROUNDS):
        steps = steady(world_of(run.config, rates, workers=run.workers, cores=cores), fixed_pace(run.config))
        first, last = steps[0].totals, steps[-1].totals
        learner_s = (last.learner_s - first.learner_s) / (len(steps) - 1)
        engine_s = (last.computing_s - first.computing_s) / max(1, last.computed - first.computed)
        learner, engine = run.rates.learner_s / learner_s, run.engine_s / engine_s
        rates = replace(
            rates,
            learner_s=rates.learner_s * learner,
            group_s=rates.group_s * engine,
            alone_s=rates.alone_s * engine,
        )
    return rates
