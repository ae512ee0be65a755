"""Simulates slots, workers and a learner as discrete events, driven by the learner's own PaceController.

A group's life: reserved (holds a slot) -> computed, sharing the engines -> waiting for its tools -> ready -> taken -> trained
-> released when weights trained on it are live. The learner prefetches a batch while it trains another, and windowed_fifo waits
for stragglers, as docs/buffer.md says.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import mean

from learner.pace.controller import STEPS_BEFORE_PAUSE, PaceController, PaceObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Times are in seconds; `cores`: learner and workers share that many, 0: each worker and the learner have their own."""

    groups_per_step: int = 8
    max_age: int = 8
    learner_s: float = 0.2
    learner_threads: int = 1
    workers: int = 4
    groups_per_worker: int = 8
    group_s: float = 0.05
    """Work of one group for one engine."""
    latency: Callable[[Random], float] = lambda _: 0.0
    """Time that a group waits for its slowest tool."""
    push_s: float = 0.02
    cores: int = 0

    @property
    def most_slots(self) -> int:
        return (self.max_age + 1) * self.groups_per_step


def lognormal(median_s: float, random: Random, *, siblings: int = 8) -> float:
    """Return the longest of the siblings' latencies."""
    return median_s * math.exp(max(random.gauss(0, 1) for _ in range(siblings)))


def bimodal(short_s: float, random: Random, *, siblings: int = 8) -> float:
    """Return the longest of the siblings' latencies: one in eight is four times as long."""
    return short_s * max(4 if random.random() < 1 / 8 else 1 for _ in range(siblings))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    number: int
    version: int
    """The live version when its ticket was issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    ended: float
    ages: tuple[int, ...]
    pace: float


@dataclass
class Simulation:
    """`pace`: a fixed one in steps' worth of groups; None: the controller decides."""

    world: World
    seed: int
    pace: float | None = None
    changes: Mapping[int, Callable[[World], World]] = field(default_factory=dict[int, Callable[[World], World]])
    """Step after which the world changes -> the new world."""
    evaluated_every: int = 0
    """The engines pause for `pause_s` when the weights of every so many steps are live; 0: never."""
    pause_s: float = 0.0
    foresees: bool = True
    """Whether the controller is told that a pause is ahead."""

    def __post_init__(self) -> None:
        self._rollouts, self._trainings = Random(self.seed), Random(self.seed + 1)
        self._controller = PaceController(groups_per_step=self.world.groups_per_step)
        self._now = self._work_done = self._training_left = 0.0
        self._live = self._version = 0
        self._paused_until = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._computing: list[tuple[float, int, SimulatedGroup]] = []
        """Work at which it is finished, in `_work_done` of each engine's fair share."""
        self._reserved: dict[int, SimulatedGroup] = {}
        self._ready: list[SimulatedGroup] = []
        self._prefetched: list[SimulatedGroup] = []
        self._training: list[SimulatedGroup] = []
        self._unreleased: list[list[SimulatedGroup]] = []
        self._slots = self._slots_at(self._controller.pace)
        self.steps: list[SimulatedStep] = []

    def run(self, steps: int) -> list[SimulatedStep]:
        while len(self.steps) < steps:
            self._reserve()
            self._feed_learner()
            self._advance()
        return self.steps

    def _slots_at(self, pace: float) -> int:
        wanted = self.pace if self.pace is not None else pace
        return min(self.world.most_slots, math.floor(wanted * self.world.groups_per_step + 1e-6))

    @property
    def _used(self) -> int:
        trained = sum(len(batch) for batch in self._unreleased)
        return len(self._reserved) + len(self._ready) + len(self._prefetched) + trained

    def _reserve(self) -> None:
        while self._used < self._slots and len(self._reserved) < self.world.workers * self.world.groups_per_worker:
            group = SimulatedGroup(number=next(self._numbers), version=self._live)
            self._reserved[group.number] = group
            work = self.world.group_s * self._rollouts.lognormvariate(-0.045, 0.3)
            heapq.heappush(self._computing, (self._work_done + work, group.number, group))

    def _feed_learner(self) -> None:
        for _ in range(2):  # the batch to train, then the one after it
            if not self._prefetched:
                self._prefetched = self._take()
            if not self._training and self._prefetched:
                self._training, self._prefetched = self._prefetched, []
                self._unreleased.append(self._training)
                took = self.world.learner_s * self._trainings.lognormvariate(-0.0032, 0.08)
                self._training_left = took * self.world.learner_threads

    def _take(self) -> list[SimulatedGroup]:
        """Return the oldest ready groups, or none while an unfinished group would become too old meanwhile."""
        size, version = self.world.groups_per_step, self._version + bool(self._training)
        self._ready.sort(key=lambda group: (group.version, group.number))
        if len(self._ready) < size:
            return []
        for ahead in range(self._ready[size - 1].version + self.world.max_age - version):
            due = sum(group.version + self.world.max_age <= version + ahead for group in self._reserved.values())
            if due > size * ahead:
                return []
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def _advance(self) -> None:
        """Let time pass until the next thing happens."""
        is_paused = self._now < self._paused_until
        engines = 0 if is_paused else min(len(self._computing), self.world.workers)
        threads = self.world.learner_threads if self._training else 0
        wanted = engines + threads
        speed = min(1.0, self.world.cores / wanted) if self.world.cores and wanted else 1.0
        share = engines * speed / len(self._computing) if self._computing else 0.0
        until_event = self._events[0][0] - self._now if self._events else math.inf
        until_computed = (self._computing[0][0] - self._work_done) / share if share else math.inf
        until_trained = self._training_left / (threads * speed) if threads else math.inf
        passed = max(0.0, min(until_event, until_computed, until_trained))
        assert passed < math.inf, "nothing can happen any more"
        self._now += passed
        self._work_done += passed * share
        self._training_left -= passed * threads * speed
        if passed >= until_event:
            heapq.heappop(self._events)[2]()
        elif passed >= until_computed:
            group = heapq.heappop(self._computing)[2]
            self._schedule(self.world.latency(self._rollouts), partial(self._commit, group))
        else:
            self._end_training()

    def _schedule(self, after_s: float, effect: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + after_s, next(self._numbers), effect))

    def _commit(self, group: SimulatedGroup) -> None:
        if self._reserved.pop(group.number, None) is not None:  # else its worker was lost
            self._ready.append(group)

    def _end_training(self) -> None:
        trained, self._training = self._training, []
        others = sum(len(batch) for batch in self._unreleased)
        ages = tuple(self._version - group.version for group in trained)
        self.steps.append(SimulatedStep(ended=self._now, ages=ages, pace=self._slots / self.world.groups_per_step))
        left = -len(self.steps) % self.evaluated_every if self.evaluated_every and self.foresees else 0
        seen = PaceObservation(reserved=len(self._reserved), unreleased=others, pause_ahead=1 <= left <= STEPS_BEFORE_PAUSE)
        self._controller = self._controller.after(seen)
        self._version += 1
        self._schedule(self.world.push_s, partial(self._go_live, self._version, trained, self._slots_at(self._controller.pace)))
        if self.evaluated_every and len(self.steps) % self.evaluated_every == 0:
            self._schedule(self.world.push_s, self._pause)
        if (change := self.changes.get(len(self.steps))) is not None:
            self._change(change(self.world))

    def _pause(self) -> None:
        self._paused_until = self._now + self.pause_s
        self._schedule(self.pause_s, lambda: None)  # wakes the engines

    def _go_live(self, version: int, trained: list[SimulatedGroup], slots: int) -> None:
        self._live, self._slots = version, slots
        self._unreleased.remove(trained)

    def _change(self, world: World) -> None:
        lost = self.world.workers - world.workers
        if lost > 0:  # their groups are rolled out again when the leases expire
            gone = [number for number in self._reserved if number % self.world.workers < lost]
            self._computing = [entry for entry in self._computing if entry[1] not in gone]
            heapq.heapify(self._computing)
            self._schedule(1.0, partial(self._expire, gone))
        self.world = world

    def _expire(self, gone: list[int]) -> None:
        for number in gone:
            self._reserved.pop(number, None)


def seconds_per_step(steps: list[SimulatedStep]) -> float:
    return (steps[-1].ended - steps[0].ended) / (len(steps) - 1)


def mean_age(steps: Iterable[SimulatedStep]) -> float:
    return mean(mean(step.ages) for step in steps)


WORLDS: Mapping[str, World] = {
    "shared cores": World(cores=2, learner_s=0.15, workers=2, groups_per_worker=16, group_s=0.15 / 8),
    "shared cores, much to roll out": World(cores=2, learner_s=0.15, workers=2, groups_per_worker=16, group_s=0.25 / 8),
    "workers twice as fast": World(),
    "workers half as fast": World(group_s=0.2),
    "balanced": World(group_s=0.1),
    "long tools": World(latency=partial(lognormal, 0.4), groups_per_worker=64),
    "short tools": World(latency=partial(lognormal, 0.1), groups_per_worker=64),
    "some answers four times as long": World(latency=partial(bimodal, 0.1), groups_per_worker=16),
}


def with_more_latency(world: World) -> World:
    return replace(world, latency=partial(lognormal, 0.4))
