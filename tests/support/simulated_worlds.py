"""Worlds for the learner's simulation: shared cores, slow tools, answers of two lengths.

python -m tests.support.simulated_worlds      # the table of docs/decisions/pace.md, two minutes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from statistics import mean

from learner.simulation.model import SimulatedStep, Simulation
from learner.simulation.world import SimulatedWorld


def lognormal(median_s: float, random: Random, *, siblings: int = 8) -> float:
    """Return the longest of the siblings' latencies."""
    return median_s * math.exp(max(random.gauss(0, 1) for _ in range(siblings)))


def bimodal(short_s: float, random: Random, *, siblings: int = 8) -> float:
    """Return the longest of the siblings' latencies: one in eight is four times as long."""
    return short_s * max(4 if random.random() < 1 / 8 else 1 for _ in range(siblings))


def seconds_per_step(steps: list[SimulatedStep]) -> float:
    return (steps[-1].ended - steps[0].ended) / (len(steps) - 1)


def mean_age(steps: Iterable[SimulatedStep]) -> float:
    return mean(mean(step.ages) for step in steps)


WORLDS: Mapping[str, SimulatedWorld] = {
    "shared cores": SimulatedWorld(cores=2, learner_s=0.15, workers=2, groups_per_worker=16, group_s=0.15 / 8),
    "shared cores, much to roll out": SimulatedWorld(
        cores=2, learner_s=0.15, workers=2, groups_per_worker=16, group_s=0.25 / 8
    ),
    "workers twice as fast": SimulatedWorld(),
    "workers half as fast": SimulatedWorld(group_s=0.2),
    "balanced": SimulatedWorld(group_s=0.1),
    "long tools": SimulatedWorld(latency=partial(lognormal, 0.4), groups_per_worker=64),
    "short tools": SimulatedWorld(latency=partial(lognormal, 0.1), groups_per_worker=64),
    "some answers four times as long": SimulatedWorld(latency=partial(bimodal, 0.1), groups_per_worker=16),
}


def with_more_latency(world: SimulatedWorld) -> SimulatedWorld:
    return replace(world, latency=partial(lognormal, 0.4))


FULL = 99.0
SEEDS, STEPS, SKIPPED = (1, 2, 3), 300, 60


def figures(
    world: SimulatedWorld, pace: float | None = None, *, seeds: Iterable[int] = SEEDS, steps: int = STEPS
) -> tuple[float, float]:
    """Return seconds per step and mean age of a steady world, in which no group may exceed the bound.

    `pace` None: the controller decides.
    """
    runs = [Simulation(world, seed, pace).run(steps)[SKIPPED:] for seed in seeds]
    assert max(max(step.ages) for run in runs for step in run) <= world.max_age
    return mean(map(seconds_per_step, runs)), mean(map(mean_age, runs))


def smallest_pace(world: SimulatedWorld, enough_s: float) -> tuple[float, float, float]:
    """Return the smallest fixed pace at which a step takes no longer than that, with seconds per step and mean age."""
    for pace in count(2.0, 0.5):
        took_s, age = figures(world, pace)
        if took_s <= enough_s:
            return pace, took_s, age
    raise AssertionError


def main() -> None:
    print("| world | full slots | smallest fixed pace with 0.97 | auto |\n|---|---|---|---|")
    for name, world in WORLDS.items():
        (full_s, full_age), (auto_s, auto_age) = figures(world, FULL), figures(world)
        pace, fixed_s, fixed_age = smallest_pace(world, full_s / 0.97)
        fixed = f"{pace:g}: {full_s / fixed_s:.2f} / {fixed_age:.1f}"
        print(f"| {name} | 1 / {full_age:.1f} | {fixed} | {full_s / auto_s:.2f} / {auto_age:.1f} |", flush=True)


if __name__ == "__main__":
    main()
