"""What the episodes of a group do when, measured on the worker; it travels with the group (`RolloutGroup.times`).

The worker opens a timeline per ticket; a context variable brings it to the stages of its episodes.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from async_rl.types import Completion, EpisodeSpan, GroupTimes, Rollout, RolloutGroup, Task

MAX_SPANS = 2048
"""Spans kept per group; later ones are left out."""
ALL_SIBLINGS = -1


class GroupTimeline:
    """The times of one group, and what there is of it should it be dropped. Begins when it is made."""

    def __init__(self) -> None:
        self._reserved_at, self._since = time.time(), time.monotonic()
        self._spans: list[EpisodeSpan] = []
        self.task: Task | None = None
        """Set once it is posed."""
        self.rollouts: list[Rollout] = []
        """The siblings that have ended."""

    def now(self) -> float:
        """Seconds since the ticket was reserved."""
        return time.monotonic() - self._since

    def add(self, span: EpisodeSpan) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)

    def times(self) -> GroupTimes:
        return GroupTimes(reserved_at=self._reserved_at, seconds=self.now(), spans=tuple(self._spans))

    def so_far(self, ticket: str, worker: str) -> RolloutGroup:
        """Return what there is of the group when it is dropped."""
        task = self.task if self.task is not None else Task(key="", environment="", prompt="")
        return RolloutGroup(id=ticket, task=task, rollouts=tuple(self.rollouts), worker=worker, times=self.times())

    @contextmanager
    def measured(self) -> Generator[None]:
        """Measure the stages inside, also those of tasks that are started inside."""
        before = _clock.set(EpisodeClock(self, ALL_SIBLINGS))
        try:
            yield
        finally:
            _clock.reset(before)


class EpisodeClock(NamedTuple):
    """Adds what one episode does to the timeline of its group."""

    timeline: GroupTimeline
    sibling: int

    def add(self, stage: str, since: float) -> None:
        """Add a stage that ends now. `since`: `timeline.now()` at its begin."""
        self.timeline.add(EpisodeSpan(stage, self.sibling, since, self.timeline.now()))

    def add_generation(self, completion: Completion, since: float) -> None:
        """Add a generation that ends now: its wait for the engine, if that was measured, and the rest."""
        began, ends = since + completion.queued_s, self.timeline.now()
        if completion.queued_s > 0:
            self.timeline.add(EpisodeSpan("queue", self.sibling, since, began))
        spans = completion.versions  # in order, and versions only grow
        oldest, newest = (spans[0].version, spans[-1].version) if spans else (-1, -1)
        self.timeline.add(EpisodeSpan("inference", self.sibling, min(began, ends), ends, oldest, newest))


_clock: ContextVar[EpisodeClock | None] = ContextVar("episode_clock", default=None)


def current_clock() -> EpisodeClock | None:
    """The clock of the episode that runs here; None where nothing is measured."""
    return _clock.get()


@contextmanager
def as_sibling(number: int) -> Generator[None]:
    """Attribute the stages inside to one episode of the group."""
    clock = _clock.get()
    before = _clock.set(clock._replace(sibling=number) if clock is not None else None)
    try:
        yield
    finally:
        _clock.reset(before)
