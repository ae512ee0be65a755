"""Maps task indexes to environments while operators change the mix. Pure arithmetic over the log of changes.

    task        0 ............... 1200 .............. 1450 .............▶
    math  (3)   3                 3                   3                       from the configuration
    games                         ▁▂▃▄▅▆▇             1                       attached, weight 1, ramp 250

A change takes effect at a task index that was not handed out yet, so it never alters what an earlier index stands for: all
workers map an index to the same task, whenever they joined and whichever changes they have read.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import Field, NonNegativeInt, ValidationError

from async_rl.config.rollout import EnvironmentConfig
from async_rl.config.section import Section
from async_rl.errors import ConfigError, FleetMismatch
from async_rl.types import MixChange

PERIOD = 5040
"""Tasks after which the order of the environments repeats. Divisible by 1 to 10, so that everyday ratios come out exact."""
RAMP_STEPS = 16
"""Steps in which a ramp moves a weight to its target."""


class EnvironmentChange(Section):
    """One entry of the log of changes."""

    name: str = Field(pattern=r"^[^\s/|]+$")
    weight: float = Field(ge=0, allow_inf_nan=False)
    """0 detaches it."""
    ramp: NonNegativeInt = 0
    """Tasks over which the weight moves to its new value; 0: at once."""
    environment: EnvironmentConfig | None = None
    """The section of an environment that is attached for the first time. Its name keeps this meaning for the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTask:
    """The `index`-th task of an environment's own stream."""

    environment: str
    index: int


class MixSchedule:
    """The mix of a run: its configured environments and the changes so far."""

    def __init__(self, environments: Sequence[EnvironmentConfig], log: Sequence[MixChange] = ()) -> None:
        trained = [section for section in environments if not section.evaluation_only]
        if not trained:
            raise ConfigError("all environments are evaluation_only, so there is nothing to train on")
        changes = [(entry.at, read_change(entry)) for entry in log]
        attached = [change.environment for _, change in changes if change.environment is not None]
        sections = {section.label: section for section in reversed((*trained, *attached))}  # the first section of a name counts
        self.sections: Mapping[str, EnvironmentConfig] = dict(reversed(sections.items()))
        """Every environment that was ever in the mix."""
        self._weights = _weights({section.label: section.weight for section in trained}, changes)
        self._segments = list(self._segments_of())

    def place(self, task_index: int) -> EnvironmentTask:
        segment = self._segments[bisect_right(self._segments, task_index, key=lambda segment: segment.first) - 1]
        return segment.place(task_index - segment.first)

    def weights_at(self, task_index: int) -> dict[str, float]:
        """The weights at a task index, of environments whose weight is above 0."""
        weights = {name: _in_force(steps, task_index) for name, steps in self._weights.items()}
        return {name: weight for name, weight in weights.items() if weight > 0}

    @property
    def final_weights(self) -> dict[str, float]:
        """The weights above 0 after all ramps have ended."""
        return {name: steps[-1][1] for name, steps in self._weights.items() if steps[-1][1] > 0}

    def _segments_of(self) -> Iterator[MixSegment]:
        borders = sorted({0, *(first for steps in self._weights.values() for first, _ in steps)})
        weights, seen = dict[str, float](), Counter[str]()
        for first, end in zip(borders, [*borders[1:], None], strict=True):
            asked = self.weights_at(first)
            weights = asked if asked else weights  # the last environment cannot be detached; a log that does is not ours
            segment = MixSegment(first=first, names=tuple(weights), weights=tuple(weights.values()), seen=dict(seen))
            yield segment
            if end is not None:
                seen.update(segment.drawn(end - first))


class MixSegment:
    """Consecutive tasks dealt by the same weights. What is dealt does not depend on where the segment ends."""

    def __init__(self, *, first: int, names: Sequence[str], weights: Sequence[float], seen: Mapping[str, int]) -> None:
        self.first = first
        self._names, self._seen = names, seen
        self._shares = apportion(weights, PERIOD)
        self._coming = _dealt(self._shares)
        self._dealt_places: list[tuple[int, int]] = []
        """The part of a round computed so far: most segments of a ramp are short."""

    def place(self, position: int) -> EnvironmentTask:
        rounds, place = divmod(position, PERIOD)
        chosen, earlier = self._dealt_until(place + 1)[place]
        name = self._names[chosen]
        return EnvironmentTask(environment=name, index=self._seen.get(name, 0) + rounds * self._shares[chosen] + earlier)

    def drawn(self, count: int) -> dict[str, int]:
        """How many of the first `count` tasks each environment gets."""
        rounds, rest = divmod(count, PERIOD)
        begun = Counter(chosen for chosen, _ in self._dealt_until(rest)[:rest])
        return {name: rounds * self._shares[owner] + begun[owner] for owner, name in enumerate(self._names)}

    def _dealt_until(self, count: int) -> list[tuple[int, int]]:
        self._dealt_places.extend(islice(self._coming, max(0, count - len(self._dealt_places))))
        return self._dealt_places


def read_change(entry: MixChange) -> EnvironmentChange:
    try:
        return EnvironmentChange.model_validate_json(entry.change)
    except ValidationError as error:
        raise FleetMismatch(f"a change of the run's mix of environments cannot be read here: {entry.change[:200]!r}") from error


_Steps = list[tuple[int, float]]
"""Pairs of a first task index and the weight from there on, ascending."""


def _weights(base: Mapping[str, float], changes: Sequence[tuple[int, EnvironmentChange]]) -> dict[str, _Steps]:
    weights: dict[str, _Steps] = {name: [(0, weight)] for name, weight in base.items()}
    for at, change in changes:
        before = weights.get(change.name, [(0, 0.0)])
        kept = [step for step in before if step[0] < at]
        weights[change.name] = [*kept, *_ramp(_in_force(before, at), at, change)]
    return weights


def _ramp(before: float, at: int, change: EnvironmentChange) -> Iterator[tuple[int, float]]:
    steps = min(RAMP_STEPS, change.ramp)
    for step in range(steps):
        yield at + change.ramp * step // steps, before + (change.weight - before) * (step + 0.5) / steps
    yield at + change.ramp, change.weight


def _in_force(steps: _Steps, task_index: int) -> float:
    reached = bisect_right(steps, task_index, key=lambda step: step[0])
    return steps[reached - 1][1] if reached else 0.0


def apportion(weights: Sequence[float], places: int) -> list[int]:
    """Integer shares of `places` by largest remainder, at least one each: a small weight is rare, not absent."""
    spare = places - len(weights)
    exact = [weight / sum(weights) * places for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda owner: shares[owner] - exact[owner])
    if spare < 0:
        raise ValueError(f"{len(weights)} environments do not fit into {places} places")
    while (missing := places - sum(shares)) > 0:
        for owner in by_remainder[:missing]:
            shares[owner] += 1
    while sum(shares) > places:  # only when shares were raised to one
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
    return shares


def interleave(shares: Sequence[int]) -> list[tuple[int, int]]:
    """For each place, the owner's index and how many places it had before. Every owner's places are spread evenly."""
    return list(_dealt(shares))


def _dealt(shares: Sequence[int]) -> Iterator[tuple[int, int]]:
    spreads = (_spread(owner, share) for owner, share in enumerate(shares))
    return ((owner, turn) for _, owner, turn in heapq.merge(*spreads))


def _spread(owner: int, share: int) -> Iterator[tuple[float, int, int]]:
    return (((turn + 0.5) / share, owner, turn) for turn in range(share))
