"""Pure: when a broken environment is paused, and when it is tried again.

        `after` groups fail in a row              `pause_s` later
CLOSED ─────────────────────────────▶ OPEN ─────────────────────▶ HALF OPEN: one group tries it
  ▲                                     ▲                          │        │
  └──────────── it succeeds ────────────┼──────────────────────────┘        │
                                        └───────────── it fails ────────────┘
"""

from __future__ import annotations


class CircuitBreaker:
    """A circuit breaker. Times are seconds of the caller's clock."""

    def __init__(self, *, after: int, pause_s: float) -> None:
        self._after = after
        self._pause_s = pause_s
        self._failed_in_a_row = 0
        self._opened_at: float | None = None
        self._is_in_trial = False

    @property
    def is_closed(self) -> bool:
        return self._opened_at is None

    def admits(self, now: float) -> bool:
        """Return whether a group may start. A group admitted while half open must report its result."""
        if self._opened_at is None:
            return True
        if self._is_in_trial or now < self._opened_at + self._pause_s:
            return False
        self._is_in_trial = True
        return True

    def wait_s(self, now: float) -> float | None:
        """Seconds until `admits` may change; None while it depends on a running trial."""
        if self._opened_at is None:
            return 0.0
        return None if self._is_in_trial else max(0.0, self._opened_at + self._pause_s - now)

    def open(self, now: float, *, for_s: float) -> None:
        """Open for `for_s` seconds regardless of failures, then half open."""
        self._opened_at, self._is_in_trial = now + for_s - self._pause_s, False

    def succeeded(self) -> None:
        self._failed_in_a_row = 0
        self._opened_at, self._is_in_trial = None, False

    def failed(self, now: float, *, may_open: bool) -> bool:
        """Count a failed group; return whether it opened the breaker. `may_open` is False for the last working environment."""
        self._failed_in_a_row += 1
        was_closed = self.is_closed
        if was_closed and (not may_open or not self._after or self._failed_in_a_row < self._after):
            return False
        if was_closed or self._is_in_trial:  # a group admitted before the breaker opened says nothing new
            self._opened_at, self._is_in_trial = now, False
        return was_closed

    def trial_ended_without_result(self) -> None:
        """The trial group ended without a result: the next group becomes the trial."""
        self._is_in_trial = False
