"""Pure: how many groups a worker should roll out at a time (`groups_in_flight: auto`), from the load of its engine.

                     0                      CALM        FULL       1
    KV cache in use  ├────────────────────────┼───────────┼────────┤
                                more             stay       fewer

The limit rises in small steps, each after as many groups have finished as the limit allows: only then does the load
show the effect of the last step. It falls back to the last limit that caused no pressure, which is then a ceiling for a
while. Under a steady load it settles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_workers.inference.rollout_engine import EngineMetrics

CALM, FULL = 0.7, 0.9
MAX_QUEUE_S = 1.0
"""Generations that wait longer than this for their first token mean that too many groups run."""
INITIAL = 4
STEP_UP = 1 / 8
"""Share by which the limit rises, at least one group."""
STEP_DOWN = 3 / 4
"""Factor by which the limit falls when even the last good one is too high."""
CEILING_LASTS = 8
"""A limit that was too high is tried again after this many times the limit in finished groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an inference engine."""

    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    waiting: int = 0
    """Generations waiting for room in the KV cache."""
    queue_s: float = 0.0
    """Mean time that recent generations waited for their first token."""

    @property
    def is_pressing(self) -> bool:
        return self.kv_used > FULL or (self.waiting > 0 and self.queue_s > MAX_QUEUE_S)

    @property
    def is_calm(self) -> bool:
        return self.kv_used < CALM and not self.waiting


def load_of(metrics: EngineMetrics) -> EngineLoad:
    kv_used = metrics.kv_blocks_used / metrics.kv_blocks if metrics.kv_blocks else 0.0
    return EngineLoad(kv_used=kv_used, waiting=metrics.waiting_requests, queue_s=metrics.queue_s)


class ConcurrencyLimit:
    """`limit` is how many groups may run at once. Call `observe` at every heartbeat."""

    def __init__(self, *, at_most: int) -> None:
        self.limit = min(INITIAL, at_most)
        self._at_most = at_most
        self._went_well = 0
        """The highest limit without pressure so far; 0 while there is none."""
        self._ceiling = at_most
        self._ceiling_until = 0
        self._changed_at = 0
        """Number of finished groups at the last change."""

    def observe(self, *, playing: int, finished: int, load: EngineLoad) -> None:
        """Adapt the limit. `finished` counts all groups since the worker started."""
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
