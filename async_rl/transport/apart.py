"""Which workers are better not sent to together: those that reach the learner, but perhaps not each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

_FEW = 8
"""So many are sent to one by one rather than searched for who cannot meet whom, which would cost a timeout for each guess."""


class Apart:
    """Known from a push in which they failed together, nobody was to blame, and each was served when it was alone."""

    def __init__(self, for_s: float) -> None:
        """`for_s`: after so long they may try together again, which costs everybody a timeout if it was too soon."""
        self._for_s = for_s
        self._members: frozenset[str] = frozenset()
        self._until = 0.0

    def cohorts(self, members: Sequence[str]) -> list[list[str]]:
        """Whom to send to together."""
        if time.monotonic() > self._until:
            self._members = frozenset()
        together = [member for member in members if member not in self._members]
        alone = [[member] for member in members if member in self._members]
        return [together, *alone] if together else alone

    @staticmethod
    def divided(victims: Sequence[str]) -> list[list[str]]:
        """They failed together: who goes on with whom."""
        if len(victims) <= _FEW:
            return [[member] for member in victims]
        middle = len(victims) // 2
        return [list(victims[:middle]), list(victims[middle:])]

    def learn(self, served_alone: Collection[str]) -> None:
        """Of a push in which victims were divided."""
        if len(served_alone) > 1:
            self._members |= frozenset(served_alone)
            self._until = time.monotonic() + self._for_s
