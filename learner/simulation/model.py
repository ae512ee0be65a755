"""Simulates slots, workers and a learner as discrete events, driven by the learner's own PaceController.

A group's life: reserved (holds a slot) -> computed, sharing the engines -> waiting for its tools -> ready -> taken -> trained
-> released when weights trained on it are live. The learner prefetches a batch while it trains another, windowed_fifo waits
for stragglers as docs/buffer.md says, and one version is pushed at a time. docs/simulate.md says what is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

from learner.pace.controller import STEPS_BEFORE_PAUSE, PaceController, PaceObservation
from learner.simulation.world import SimulatedWorld

IDLE_S = 5.0
"""A learner that waits that long offers a version that was held back."""


@dataclass(slots=True, kw_only=True)
class SimulatedGroup:
    number: int
    version: int
    """The live version when its ticket was issued."""
    began: float
    committed: int = -1
    """The live version when it became ready."""
    taken: int = -1
    """The version that it trains."""

    def __lt__(self, other: SimulatedGroup) -> bool:
        return self.number < other.number


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTotals:
    """What has added up since the simulation began."""

    learner_s: float = 0.0
    """Time in which the learner trained."""
    engines_s: float = 0.0
    """Time in which engines had something to compute, of all of them together."""
    computed: int = 0
    """Groups that engines have finished."""
    computing_s: float = 0.0
    """How long that took, from each one's reservation."""
    pushing_s: float = 0.0
    pushes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    ended: float
    ages: tuple[int, ...]
    in_queue: tuple[int, ...]
    """The part of each age that was gained while ready."""
    pace: float
    held: int
    """Groups that are ready or taken, and not yet trained."""
    totals: SimulatedTotals


@dataclass
class Simulation:
    """`pace`: a fixed one in steps' worth of groups; None: the controller decides."""

    world: SimulatedWorld
    seed: int
    pace: float | None = None
    changes: Mapping[int, Callable[[SimulatedWorld], SimulatedWorld]] = field(
        default_factory=dict[int, Callable[[SimulatedWorld], SimulatedWorld]]
    )
    """Step after which the world changes -> the new world."""
    evaluated_every: int = 0
    """The engines pause for `pause_s` when the weights of every so many steps are live; 0: never."""
    pause_s: float = 0.0
    foresees: bool = True
    """Whether the controller is told that a pause is ahead."""

    def __post_init__(self) -> None:
        self._rollouts, self._trainings = Random(self.seed), Random(self.seed + 1)
        self._controller = PaceController(groups_per_step=self.world.groups_per_step, lowest=self.world.lowest_pace)
        self._now = self._work_done = self._training_left = self._paused_until = 0.0
        self._live = self._version = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._computing: list[tuple[float, SimulatedGroup]] = []
        """With the work at which it is finished, in `_work_done` of each one."""
        self._reserved: dict[int, SimulatedGroup] = {}
        self._reserved_by_version: Counter[int] = Counter()
        self._ready: defaultdict[int, list[SimulatedGroup]] = defaultdict(list)
        """By version; each a heap."""
        self._num_ready = 0
        self._prefetched: list[SimulatedGroup] = []
        self._training: list[SimulatedGroup] = []
        self._trained: list[tuple[int, int]] = []
        """Steps whose slots have not returned, the one being trained included, and the number of their groups."""
        self._offered = self._sent = 0
        """The newest version that was packed, and the newest whose push has begun."""
        self._offered_at = 0.0
        self._slots = self._slots_at(self._controller.pace)
        self._learner_s = self._engines_s = self._computing_s = self._pushing_s = 0.0
        self._computed = self._pushes = 0
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
        trained = sum(groups for _, groups in self._trained)
        return len(self._reserved) + self._num_ready + len(self._prefetched) + trained

    # -- workers -------------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        room = self.world.workers * self.world.groups_per_worker / self.world.playing
        for _ in range(min(self._slots - self._used, math.ceil(room - len(self._reserved)))):
            group = SimulatedGroup(number=next(self._numbers), version=self._live, began=self._now)
            self._reserved[group.number] = group
            self._reserved_by_version[group.version] += 1
            heapq.heappush(self._computing, (self._work_done + self.world.work(self._rollouts), group))

    def _computed_one(self) -> None:
        group = heapq.heappop(self._computing)[1]
        self._computed, self._computing_s = self._computed + 1, self._computing_s + self._now - group.began
        self._schedule(self.world.latency(self._rollouts), partial(self._commit, group))

    def _commit(self, group: SimulatedGroup) -> None:
        if not self._give_up(group.number):  # its worker was lost
            return
        if self.world.dropped and self._rollouts.random() < self.world.dropped:
            return
        group.committed = self._live
        heapq.heappush(self._ready[group.version], group)
        self._num_ready += 1

    def _give_up(self, number: int) -> bool:
        """Take back the ticket of a group; return whether it was there."""
        group = self._reserved.pop(number, None)
        if group is not None:
            self._reserved_by_version[group.version] -= 1
        return group is not None

    # -- the learner ---------------------------------------------------------------------------------------------------

    def _feed_learner(self) -> None:
        for _ in range(2):  # the batch to train, then the one after it
            if not self._prefetched:
                self._prefetched = self._take()
            if not self._training and self._prefetched:
                self._training, self._prefetched = self._prefetched, []
                self._trained.append((self._version + 1, len(self._training)))
                varies = self.world.learner_varies
                took = self.world.learner_s * self._trainings.lognormvariate(-(varies**2) / 2, varies)
                self._training_left = took * self.world.learner_threads

    def _take(self) -> list[SimulatedGroup]:
        """Return the oldest ready groups, or none while an unfinished group would become too old meanwhile."""
        size, version, bound = self.world.groups_per_step, self._version + bool(self._training), self.world.age_bound
        if self._num_ready < size:
            return []
        there = sorted(born for born, groups in self._ready.items() if groups)
        counted = itertools.accumulate(len(self._ready[born]) for born in there)
        newest = next(born for born, count in zip(there, counted, strict=True) if count >= size)
        for ahead in range(newest + bound - version):
            due = sum(count for born, count in self._reserved_by_version.items() if born + bound <= version + ahead)
            if due > size * ahead:
                return []
        taken: list[SimulatedGroup] = []
        for born in there:
            while self._ready[born] and len(taken) < size:
                taken.append(heapq.heappop(self._ready[born]))
            if not self._ready[born]:
                del self._ready[born]
        for group in taken:
            group.taken = version
        self._num_ready -= size
        for born in [born for born, count in self._reserved_by_version.items() if not count]:
            del self._reserved_by_version[born]
        return taken

    def _end_training(self) -> None:
        trained, self._training = self._training, []
        left = -(len(self.steps) + 1) % self.evaluated_every if self.evaluated_every and self.foresees else 0
        unreleased = sum(groups for _, groups in self._trained)
        seen = PaceObservation(
            reserved=len(self._reserved),
            unreleased=unreleased,
            held_back=not self._prefetched and self._num_ready >= self.world.groups_per_step,
            pause_ahead=1 <= left <= STEPS_BEFORE_PAUSE,
        )
        self._controller = self._controller.after(seen)
        self._note_step(trained)
        self._slots = self._slots_at(self._controller.pace)
        self._version += 1
        if self.world.pushes.is_due(steps=self._version - self._offered, seconds=self._now - self._offered_at):
            self._offer()
        if self.evaluated_every and len(self.steps) % self.evaluated_every == 0:
            self._schedule(self.world.push_s, self._pause)
        if (change := self.changes.get(len(self.steps))) is not None:
            self._change(change(self.world))

    def _note_step(self, trained: list[SimulatedGroup]) -> None:
        totals = SimulatedTotals(
            learner_s=self._learner_s,
            engines_s=self._engines_s,
            computed=self._computed,
            computing_s=self._computing_s,
            pushing_s=self._pushing_s,
            pushes=self._pushes,
        )
        step = SimulatedStep(
            ended=self._now,
            ages=tuple(group.taken - group.version for group in trained),
            in_queue=tuple(group.taken - group.committed for group in trained),
            pace=self._slots / self.world.groups_per_step,
            held=self._num_ready + len(self._prefetched) + len(trained),
            totals=totals,
        )
        self.steps.append(step)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        self._offered, self._offered_at = self._version, self._now
        if self._live == self._sent:
            self._push()

    def _push(self) -> None:
        """Push the newest packed version; those that were packed meanwhile wait, and the newest of them comes next."""
        self._sent = self._offered
        self._pushes, self._pushing_s = self._pushes + 1, self._pushing_s + self.world.push_s
        self._schedule(self.world.push_s, partial(self._go_live, self._sent))

    def _go_live(self, version: int) -> None:
        self._live = version
        self._trained = [(made, groups) for made, groups in self._trained if made > version]
        if self._offered > version:
            self._push()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let time pass until the next thing happens."""
        world, is_paused = self.world, self._now < self._paused_until
        engines = 0 if is_paused else min(len(self._computing), world.workers)
        threads = world.learner_threads if self._training else 0
        wanted = engines + threads
        speed = min(1.0, world.cores / wanted) if world.cores and wanted else 1.0
        rate = speed / world.seconds_in_engine(len(self._computing) / engines) if engines else 0.0
        until_event = self._events[0][0] - self._now if self._events else math.inf
        until_computed = (self._computing[0][0] - self._work_done) / rate if rate else math.inf
        until_trained = self._training_left / (threads * speed) if threads else math.inf
        passed = max(0.0, min(until_event, until_computed, until_trained))
        if passed == math.inf:  # all slots are those of a version that is held back
            assert self._version > self._offered, "nothing can happen any more"
            self._schedule(IDLE_S, self._offer)
            return
        self._now += passed
        self._work_done += passed * rate
        self._training_left -= passed * threads * speed
        self._learner_s += passed * bool(threads)
        self._engines_s += passed * engines
        if passed >= until_event:
            heapq.heappop(self._events)[2]()
        elif passed >= until_computed:
            self._computed_one()
        else:
            self._end_training()

    def _schedule(self, after_s: float, effect: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + after_s, next(self._numbers), effect))

    # -- disturbances --------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._paused_until = self._now + self.pause_s
        self._schedule(self.pause_s, lambda: None)  # wakes the engines

    def _change(self, world: SimulatedWorld) -> None:
        lost = self.world.workers - world.workers
        if lost > 0:  # their groups are rolled out again when the leases expire
            gone = {number for number in self._reserved if number % self.world.workers < lost}
            self._computing = [entry for entry in self._computing if entry[1].number not in gone]
            heapq.heapify(self._computing)
            self._schedule(1.0, partial(self._expire, gone))
        self.world = world

    def _expire(self, gone: set[int]) -> None:
        for number in gone:
            self._give_up(number)
