"""Pure: how many groups a worker should roll out at a time, from what its engine says of itself.

                     0                      CALM        FULL       1
    KV cache in use  ├────────────────────────┼───────────┼────────┤
                                more             stay       fewer

More comes in small steps, once as many groups have finished as may fly: only then does the load show what the last step did.
Fewer means back to what went well, and stays so for a while. A steady load therefore finds a steady number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CALM, FULL = 0.7, 0.9
MAX_QUEUE_S = 1.0
"""Generations that wait longer than this for their first token say that there are too many."""
INITIAL = 4
STEP_UP = 1 / 8
"""The next step, by at least one group."""
STEP_DOWN = 3 / 4
"""Where even what went well before is too much."""
CEILING_LASTS = 8
"""So many generations of groups land before a number that was too high is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine says of itself."""

    kv_used: float = 0.0
    """Share of the KV cache."""
    waiting: int = 0
    """Generations that wait for room."""
    queue_s: float = 0.0
    """How long those that began lately had waited."""

    @property
    def is_pressing(self) -> bool:
        return self.kv_used > FULL or (self.waiting > 0 and self.queue_s > MAX_QUEUE_S)

    @property
    def is_calm(self) -> bool:
        return self.kv_used < CALM and not self.waiting


class LoadMetrics(Protocol):
    """Metrics of an engine."""

    @property
    def kv_blocks(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int: ...
    @property
    def waiting_requests(self) -> int: ...
    @property
    def queue_s(self) -> float: ...


def load_of(metrics: LoadMetrics) -> EngineLoad:
    kv_used = metrics.kv_blocks_used / metrics.kv_blocks if metrics.kv_blocks else 0.0
    return EngineLoad(kv_used=kv_used, waiting=metrics.waiting_requests, queue_s=metrics.queue_s)


class ConcurrencyLimit:
    """`limit` is how many groups may fly. Call `observe` every now and then."""

    def __init__(self, *, at_most: int) -> None:
        self.limit = min(INITIAL, at_most)
        self._at_most = at_most
        self._went_well = 0
        """The highest limit that was no trouble so far; 0 while there is none."""
        self._ceiling = at_most
        self._ceiling_until = 0
        self._changed_at = 0
        """When, in finished groups."""

    def observe(self, *, playing: int, finished: int, load: EngineLoad) -> None:
        """`finished` counts all groups that ever did."""
        if playing > self.limit:
            return  # the last step down has not shown yet
        if load.is_pressing:
            self._step_down(finished)
        elif finished - self._changed_at >= self.limit:
            self._went_well = max(self._went_well, self.limit)
            self._step_up(playing, finished, load)

    def _step_up(self, playing: int, finished: int, load: EngineLoad) -> None:
        if finished >= self._ceiling_until:
            self._ceiling = self._at_most
        more = min(self.limit + max(1, int(self.limit * STEP_UP)), self._ceiling)
        is_short_of_tickets = playing < self.limit - 1  # one may just have finished
        would_press = load.kv_used * more > FULL * self.limit
        if more > self.limit and load.is_calm and not is_short_of_tickets and not would_press:
            self.limit, self._changed_at = more, finished

    def _step_down(self, finished: int) -> None:
        fewer = self._went_well if self._went_well < self.limit else int(self.limit * STEP_DOWN)
        self.limit = self._went_well = max(1, fewer)
        self._ceiling, self._ceiling_until = self.limit, finished + CEILING_LASTS * self.limit
        self._changed_at = finished
