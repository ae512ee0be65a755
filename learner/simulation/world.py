"""What is simulated: a fleet with its rates. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from learner.versions.push_policy import PushPolicy


def some_vary(random: Random) -> float:
    """Return the work of a group relative to the mean: lognormal."""
    return random.lognormvariate(-0.045, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    groups_per_step: int = 8
    max_age: float = 8
    learner_s: float = 0.2
    """Time that the learner needs for a step, its waits for groups not counted."""
    learner_varies: float = 0.08
    """Standard deviation of the logarithm of that time."""
    learner_threads: int = 1
    workers: int = 4
    groups_per_worker: int = 8
    group_s: float = 0.05
    """Time that a group takes in an engine, and takes from the groups beside it."""
    alone_s: float = 0.0
    """Time that it takes besides, however many there are: decoding a token takes some time for the smallest batch."""
    work: Callable[[Random], float] = some_vary
    """A group's share of both times, relative to the mean."""
    latency: Callable[[Random], float] = lambda _: 0.0
    """Time that a group waits for what is no engine: its slowest tool or reward."""
    playing: float = 1.0
    """Mean share of a group's episodes that still play while it is rolled out. A worker begins a group when as many episodes
    have ended as a group has."""
    dropped: float = 0.0
    """Share of the groups that end untrained: they have no signal, or failed."""
    push_s: float = 0.02
    """From the end of a step until its weights are live."""
    pushes: PushPolicy = field(default_factory=PushPolicy)
    lowest_pace: float = 2.0
    """The controller's lower bound, in steps' worth of groups."""
    cores: int = 0
    """Learner and workers share that many; 0: each worker and the learner have their own."""

    @property
    def most_slots(self) -> int:
        return math.floor((self.max_age + 1) * self.groups_per_step)

    @property
    def age_bound(self) -> int:
        return math.ceil(self.max_age)

    def seconds_in_engine(self, groups: float) -> float:
        """Return the time of a group of mean size in an engine that computes so many."""
        return self.alone_s + self.group_s * groups
