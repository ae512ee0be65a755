"""Splits a push into push groups, when a network partition keeps workers that reach the learner from reaching each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

_FEW = 8
"""Up to this many failed workers are retried one by one. Bisecting them would cost a timeout for each wrong guess."""


class PushGroups:
    """The push groups of one push, in order. Iteration ends when no group is waiting."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._waiting = [list(group) for group in groups if group]
        self._split: set[str] = set()
        self.found: list[frozenset[str]] = []
        """Groups of split members that were served together."""

    def __iter__(self) -> Iterator[list[str]]:
        while self._waiting:
            yield self._waiting.pop(0)

    def served(self, members: Collection[str]) -> None:
        if members and self._split.issuperset(members):
            self.found.append(frozenset(members))

    def retry(self, members: Collection[str]) -> None:
        """Send to these again: they failed because another member was lost."""
        if members:
            self._waiting.append(list(members))

    def split(self, members: Sequence[str]) -> None:
        """Send to these again in smaller groups: they failed together, and no single member was the cause."""
        self._split.update(members)
        middle = len(members) // 2
        groups = [[member] for member in members] if len(members) <= _FEW else [members[:middle], members[middle:]]
        self._waiting += map(list, groups)


class Partitions:
    """Remembers from push to push which workers can be served together, once some could not."""

    def __init__(self, for_s: float) -> None:
        """`for_s`: time after which all are tried together again. Too soon costs every worker a timeout."""
        self._for_s = for_s
        self._groups: list[frozenset[str]] = []
        self._until = 0.0

    def push_groups(self, members: Sequence[str]) -> PushGroups:
        """The groups of the next push: one for each known partition, and one for all other members."""
        if time.monotonic() > self._until:
            self._groups = []
        known = frozenset[str]().union(*self._groups)
        others = [member for member in members if member not in known]
        return PushGroups([others, *([member for member in members if member in group] for group in self._groups)])

    def remember(self, found: Collection[frozenset[str]]) -> None:
        """Learn from `PushGroups.found` of a push that ended."""
        if len(found) > 1:
            new = frozenset[str]().union(*found)
            self._groups = [*(group for group in self._groups if group.isdisjoint(new)), *found]
            self._until = time.monotonic() + self._for_s
