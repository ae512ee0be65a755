"""Log lines of a healthy worker: its first weights, then its counters at intervals."""

from __future__ import annotations

import time

import structlog

from rollout_workers.counters import Counters

log = structlog.get_logger("rollout_workers")

INTERVAL_S = 30.0


class ProgressLines:
    """Call `weights_changed` with every version that the engine loads."""

    def __init__(self, counters: Counters, *, interval_s: float = INTERVAL_S) -> None:
        self._counters, self._interval_s = counters, interval_s
        self._logged_at: float | None = None

    def weights_changed(self, version: int) -> None:
        now = time.monotonic()
        if self._logged_at is None:
            log.info(f"first weights loaded (version {version}), rolling out")
        elif now - self._logged_at >= self._interval_s:
            counters = self._counters
            log.info(
                f"rolling out with version {version}",
                groups=counters.stored.total(),
                episodes=counters.episodes,
                failed=counters.failures.total(),
                tokens=counters.tokens,
            )
        else:
            return
        self._logged_at = now
