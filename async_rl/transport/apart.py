"""Which workers are better not sent to together: those that reach the learner, but perhaps not each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

_FEW = 8
"""So many are sent to one by one rather than searched for who cannot meet whom, which would cost a timeout for each guess."""


class Apart:
    """Known from a push in which they failed together, nobody was to blame, and each was served among others or alone."""

    def __init__(self, for_s: float) -> None:
        """`for_s`: after so long all may try together again, which costs everybody a timeout if it was too soon."""
        self._for_s = for_s
        self._groups: list[frozenset[str]] = []
        self._until = 0.0

    def cohorts(self, members: Sequence[str]) -> list[list[str]]:
        """Whom to send to together."""
        if time.monotonic() > self._until:
            self._groups = []
        known = frozenset[str]().union(*self._groups)
        cohorts = [[member for member in members if member not in known]]
        cohorts += [[member for member in members if member in group] for group in self._groups]
        return [cohort for cohort in cohorts if cohort]

    @staticmethod
    def divided(victims: Sequence[str]) -> list[list[str]]:
        """They failed together: who goes on with whom."""
        if len(victims) <= _FEW:
            return [[member] for member in victims]
        middle = len(victims) // 2
        return [list(victims[:middle]), list(victims[middle:])]

    def learn(self, served: Collection[Collection[str]]) -> None:
        """Who was served together, of those that were divided."""
        if len(served) > 1:
            new = frozenset[str]().union(*served)
            self._groups = [*(group for group in self._groups if group.isdisjoint(new)), *map(frozenset, served)]
            self._until = time.monotonic() + self._for_s
