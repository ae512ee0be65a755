"""A clock for tests."""

from __future__ import annotations


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock never goes back, got {seconds}")
        self._now += seconds
