"""Which workers are better not sent to together: those that reach the learner, but perhaps not each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

_FEW = 8
"""So many are sent to one by one rather than searched for who cannot meet whom, which would cost a timeout for each guess."""


class PushGroups:
    """The cohorts of one push: who is still to be sent to, and who turned out to be served with whom."""

    def __init__(self, cohorts: Sequence[Sequence[str]]) -> None:
        self._waiting = [list(cohort) for cohort in cohorts if cohort]
        self._divided: set[str] = set()
        self.found: list[frozenset[str]] = []
        """Who was served together, of those that were divided."""

    def __iter__(self) -> Iterator[list[str]]:
        while self._waiting:
            yield self._waiting.pop(0)

    def served(self, members: Collection[str]) -> None:
        if members and self._divided.issuperset(members):
            self.found.append(frozenset(members))

    def again(self, members: Collection[str]) -> None:
        """They failed because of somebody else."""
        if members:
            self._waiting.append(list(members))

    def divide(self, members: Sequence[str]) -> None:
        """They failed together, and nobody was to blame."""
        self._divided.update(members)
        middle = len(members) // 2
        apart = [[member] for member in members] if len(members) <= _FEW else [members[:middle], members[middle:]]
        self._waiting += map(list, apart)


class Partitions:
    """Known from a push in which they failed together, nobody was to blame, and each was served among others or alone."""

    def __init__(self, for_s: float) -> None:
        """`for_s`: after so long all may try together again, which costs everybody a timeout if it was too soon."""
        self._for_s = for_s
        self._groups: list[frozenset[str]] = []
        self._until = 0.0

    def round(self, members: Sequence[str]) -> PushGroups:
        """Whom to send to together."""
        if time.monotonic() > self._until:
            self._groups = []
        known = frozenset[str]().union(*self._groups)
        cohorts = [[member for member in members if member not in known]]
        return PushGroups(cohorts + [[member for member in members if member in group] for group in self._groups])

    def learn(self, found: Collection[frozenset[str]]) -> None:
        """What a round found, once it is over."""
        if len(found) > 1:
            new = frozenset[str]().union(*found)
            self._groups = [*(group for group in self._groups if group.isdisjoint(new)), *found]
            self._until = time.monotonic() + self._for_s
