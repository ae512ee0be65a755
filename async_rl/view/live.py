"""What the page learns from a run's Redis while it lives. `buffer/view` implements it, as only composition roots know Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker, with the counters that it posted last."""

    id: str
    is_listed: bool
    """False: it has left or is lost, but has posted counters in the last minutes."""
    host: str
    device: str
    version: int
    """Version that its engine serves; -1 before the first push."""
    catches_up: str
    """Source from which it is loading weights; "" if none."""
    seen_s: float | None
    """Seconds since it posted its counters; None: not in the last minutes."""
    tok_s: float | None
    """Tokens that it sampled per second between its last two posts."""
    counters: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """What a worker reported: failures of one cause, or code that blocks it."""

    worker: str
    environment: str
    text: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """A run as its Redis has it now."""

    live_version: int
    learner: str
    """Holder of the learner's lease; "" if none."""
    waits_for: str
    """What the learner waits for, in one sentence."""
    buffer: dict[str, Any]
    """The counters of BufferStats."""
    ages: dict[int, int]
    """Ready groups by the age that they would have if they were trained now."""
    limits: dict[str, float]
    """slots, max_slots, max_age and groups_per_step, as in force."""
    workers: tuple[WorkerState, ...]
    notes: tuple[WorkerMessage, ...]
    """The last report of each worker and cause, oldest first."""


class LiveSource(Protocol):
    async def read(self) -> LiveState | str:
        """The state now; or one sentence on why there is none. Raises nothing for a server that is gone."""
        ...
