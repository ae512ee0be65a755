"""Measures what rank 0 of the learner does between two reported steps, so that idle time has a cause."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Activity = Literal["training", "no_groups", "pushing", "checkpoint", "other"]
IDLE: tuple[Activity, ...] = ("no_groups", "pushing", "checkpoint", "other")


class StepClock:
    """Splits time among activities. An activity within another is counted for itself alone."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since = now, now()
        self._activity: Activity = "other"
        self._spent: defaultdict[Activity, float] = defaultdict(float)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        before = self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def row(self) -> Mapping[str, float]:
        """Return the share of each cause of idleness in the time since the last row."""
        self._switch(self._activity)
        spent, self._spent = self._spent, defaultdict(float)
        total = max(sum(spent.values()), 1e-9)
        return {f"idle/{cause}": spent[cause] / total for cause in IDLE}

    def _switch(self, activity: Activity) -> Activity:
        """Change to another activity; return the one before."""
        before, since = self._activity, self._since
        self._activity, self._since = activity, self._now()
        self._spent[before] += self._since - since
        return before
