"""Translates times of other machines to the learner's clock.

A worker's message says when it was sent, by the worker's clock. The learner's clock at its arrival minus that time is the
difference of the clocks plus the time that the message took, which is never negative. So the smallest difference of the last
messages is the best estimate; it is too large by the time of the fastest message, usually about a millisecond. Processes of one
machine, by its boot id, have one clock: their difference is 0.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path

MESSAGES = 64
"""Messages of a worker that are compared: about a minute, so that a clock that is set, or drifts, is followed."""


@cache
def boot_id() -> str:
    """Identify this machine since its start, the same in all of its containers; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class WorkerClocks:
    def __init__(self) -> None:
        self._differences: dict[str, deque[float]] = {}

    def heard(self, worker: str, *, sent_at: float, received_at: float, boot: str = "") -> bool:
        """Note a message. True when the estimate of the worker's clock has changed by more than a tenth of a second.

        `boot`: the boot id of the worker's machine, empty if unknown.
        """
        before = self.offset(worker) if worker in self._differences else None
        difference = 0.0 if boot and boot == boot_id() else received_at - sent_at
        self._differences.setdefault(worker, deque(maxlen=MESSAGES)).append(difference)
        return before is None or abs(self.offset(worker) - before) > 0.1

    def offset(self, worker: str) -> float:
        """Seconds to add to a worker's times; 0 for a worker that was not heard yet."""
        return min(self._differences.get(worker, (0.0,)))
