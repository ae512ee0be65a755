"""Worlds for the learner's simulation: shared cores, slow tools, answers of two lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from statistics import mean

from learner.simulation.model import SimulatedStep
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
