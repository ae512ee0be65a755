"""Decide on how many machines the learner of a cluster runs: on as many as there are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerNodes:
    """On how many machines the learner is, or waits to be; `after` returns what has seen the cluster once more.

    Another number is chosen when it was the best one for `resize_s` without a break, because each change costs a restart.
    """

    sizes: Sequence[int]
    """Possible numbers, largest first."""
    resize_s: float
    nodes: int
    better: int | None = None
    """The number that was possible instead, since `since`."""
    since: float = 0.0

    def after(self, machines: int | None, now: float) -> LearnerNodes:
        """`machines`: those that the learner has, and those that are free for it; None: it is being placed just now."""
        best = next((size for size in self.sizes if machines is not None and size <= machines), None)
        if best is None or best == self.nodes:
            return replace(self, better=None)
        if best != self.better:
            return replace(self, better=best, since=now)
        if now - self.since < self.resize_s:
            return self
        return replace(self, nodes=best, better=None)
