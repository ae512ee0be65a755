"""Simulate a policy that lends the GPUs of workers which the learner does not need, and fleets that are smaller from the start.

It drives the model behind `async-rl simulate`. docs/decisions/lending.md has its figures. A line has, relative to the whole
fleet: speed, mean age of the trained groups (the whole fleet's in brackets), share of the workers lent, starts and drains.

    python benchmarks/lending.py [--steps 400] [--seeds 3] [--content 0.01] [--starves 0.03] [--start-steps 20]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean

from learner.simulation.model import SimulatedStep, Simulation
from learner.simulation.world import SimulatedWorld

WARM_UP = 24
WINDOW = 16
"""Steps over which the learner's idle share is taken, and between two workers that are lent."""
SOONEST = 3
"""Steps after a change in which nothing is decided."""
PATIENCE = 4
"""Windows until a number that starved the learner is tried again, doubled with each time that one did."""


def slowest_tool(median_s: float, random: Random) -> float:
    return median_s * math.exp(max(random.gauss(0, 1) for _ in range(8)))


WORLDS = {
    "4 workers, twice as fast as the learner": SimulatedWorld(),
    "4 workers, as fast as the learner": SimulatedWorld(group_s=0.1),
    "4 workers, half as fast": SimulatedWorld(group_s=0.2),
    "8 workers, four times as fast": SimulatedWorld(workers=8),
    "8 workers, long tools": SimulatedWorld(workers=8, latency=partial(slowest_tool, 0.4), groups_per_worker=64),
    "8 workers, engines that batch": SimulatedWorld(workers=8, alone_s=0.4, group_s=0.01, groups_per_worker=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """How many of `most` workers are wanted: one fewer while the learner never waits, one more when it does."""

    most: int
    content: float
    """Idle share below which a worker is lent."""
    starves: float
    """Idle share above which one is asked back."""
    wanted: int
    starved_at: int = 0
    """The number with which the learner starved last."""
    trials: int = 1
    calm: int = 0
    """Steps since the last change."""

    def after(self, idle: float) -> Lending:
        """`idle`: the learner's idle share in the last steps, at most WINDOW, since the last change."""
        if idle > self.starves and self.calm >= SOONEST and self.wanted < self.most:
            return replace(self, starved_at=self.wanted, wanted=self.wanted + 1, calm=0, trials=2 * self.trials)
        is_untried = self.wanted - 1 > self.starved_at or self.calm >= WINDOW * PATIENCE * self.trials
        if idle < self.content and self.calm >= WINDOW and self.wanted > 1 and is_untried:
            return replace(self, wanted=self.wanted - 1, calm=0)
        return replace(self, calm=self.calm + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    took_s: float
    age: float
    idle: float
    """Share of the time in which the learner waits."""
    lent: float = 0.0
    changes: int = 0


def whole(world: SimulatedWorld, steps: int, seed: int) -> Figures:
    made = Simulation(world, seed).run(steps)[WARM_UP:]
    return Figures(took_s=made[-1].ended - made[0].ended, age=age_of(made), idle=idle_share(made))


def lent(world: SimulatedWorld, steps: int, seed: int, policy: Lending, start_s: float) -> Figures:
    """A worker that is lent drains at once; one that is asked back works after `start_s`."""
    simulation, starts, changes, worker_s = Simulation(world, seed), list[float](), 0, 0.0
    for step in range(1, steps + 1):
        simulation.run(step)
        if step <= WARM_UP:
            continue
        now, before = simulation.steps[-1].ended, policy
        policy = policy.after(idle_share(simulation.steps[-1 - max(1, min(WINDOW, policy.calm)) :]))
        starts += [now + start_s] * (policy.wanted > before.wanted)
        arrived = sum(start <= now for start in starts)
        starts = starts[arrived:]
        workers = simulation.world.workers + arrived - (policy.wanted < before.wanted)
        simulation.world = replace(simulation.world, workers=workers)
        changes += policy.wanted != before.wanted
        worker_s += (world.workers - workers) * (now - simulation.steps[-2].ended)
    made = simulation.steps[WARM_UP:]
    took_s = made[-1].ended - made[0].ended
    share = worker_s / took_s / world.workers
    return Figures(took_s=took_s, age=age_of(made), idle=idle_share(made), lent=share, changes=changes)


def idle_share(steps: list[SimulatedStep]) -> float:
    first, last = steps[0], steps[-1]
    return 1 - (last.totals.learner_s - first.totals.learner_s) / (last.ended - first.ended)


def age_of(steps: list[SimulatedStep]) -> float:
    return mean(mean(step.ages) for step in steps)


def show(name: str, found: list[Figures], reference: list[Figures]) -> None:
    speed = mean(each.took_s for each in reference) / mean(each.took_s for each in found)
    ages = [mean(each.age for each in figures) for figures in (found, reference)]
    changes = f"lent {mean(each.lent for each in found):.2f}  changes {mean(each.changes for each in found):.0f}"
    print(f"  {name:<28} speed {speed:.2f}  age {ages[0]:.1f} ({ages[1]:.1f})  {changes if name == 'policy' else ''}".rstrip())


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--steps", type=int, default=400)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--content", type=float, default=0.01)
    words.add_argument("--starves", type=float, default=0.03)
    words.add_argument("--start-steps", type=float, default=20.0, help="time until a worker works, in steps")
    given = words.parse_args()
    for name, world in WORLDS.items():
        seeds = range(1, given.seeds + 1)
        reference = [whole(world, given.steps, seed) for seed in seeds]
        print(f"{name}: the learner waits for {mean(each.idle for each in reference):.1%} of the time")
        for workers in (world.workers // 4, world.workers // 2, 3 * world.workers // 4):
            fewer = replace(world, workers=workers)
            show(f"{workers} from the start", [whole(fewer, given.steps, seed) for seed in seeds], reference)
        policy = Lending(most=world.workers, content=given.content, starves=given.starves, wanted=world.workers)
        start_s = given.start_steps * world.learner_s
        show("policy", [lent(world, given.steps, seed, policy, start_s) for seed in seeds], reference)


if __name__ == "__main__":
    main()
