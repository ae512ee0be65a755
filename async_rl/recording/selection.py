"""Filters and sorts a million rollouts in a fraction of a second: groups one by one, their rollouts as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from async_rl.recording.rows import GroupRow, RolloutFilter, RolloutRow

Order = Literal["newest", "oldest", "best", "worst", "longest", "shortest", "freshest", "stalest", "slowest", "quickest"]
REWARD, STATUS, SAMPLED, SECONDS = 0, 1, 2, 6
"""Places in `GroupRow.numbers`."""

_LAST = float("inf")
_OF_GROUPS: Mapping[str, Callable[[GroupRow], float]] = {
    "freshest": lambda group: group.age if group.age is not None else _LAST,
    "stalest": lambda group: -group.age if group.age is not None else _LAST,
}
_OF_ROLLOUTS: Mapping[str, tuple[int, int]] = {
    "best": (REWARD, -1),
    "worst": (REWARD, 1),
    "longest": (SAMPLED, -1),
    "shortest": (SAMPLED, 1),
    "slowest": (SECONDS, -1),
    "quickest": (SECONDS, 1),
}
"""Column and sign of the sorting key."""


class Selection:
    """The rollouts that a filter accepts, apart from its `text`, in order."""

    def __init__(self, groups: Sequence[GroupRow], wanted: RolloutFilter, order: Order) -> None:
        """`groups`: oldest first."""
        ordered = groups if order == "oldest" else groups[::-1]
        if (key := _OF_GROUPS.get(order)) is not None:
            ordered = sorted(ordered, key=key)
        self._groups = [group for group in ordered if wanted.accepts_group(group)]
        self._stops = np.cumsum([len(group.numbers) for group in self._groups], dtype=np.int64)
        """Where the rollouts of each group end among those of all groups."""
        self._total = int(self._stops[-1]) if self._groups else 0
        self._chosen = self._filtered(wanted)
        if (column_sign := _OF_ROLLOUTS.get(order)) is not None:
            column, sign = column_sign
            self._chosen = self._chosen[np.argsort(sign * self._column(column)[self._chosen], kind="stable")]

    def __len__(self) -> int:
        return len(self._chosen)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterable[RolloutRow]:
        """Yield the rollouts from number `start` on, before number `stop`."""
        for place in self._chosen[start:stop].tolist():
            number = int(np.searchsorted(self._stops, place, side="right"))
            group = self._groups[number]
            sibling = place - (int(self._stops[number]) - len(group.numbers))
            yield RolloutRow(group, sibling, *group.numbers[sibling])

    def _filtered(self, wanted: RolloutFilter) -> npt.NDArray[np.int64]:
        accepted = np.ones(self._total, np.bool_)
        if wanted.status is not None:
            found = (numbers[STATUS] == wanted.status for group in self._groups for numbers in group.numbers)
            accepted &= np.fromiter(found, np.bool_, self._total)
        for column, low, high in (
            (REWARD, wanted.min_reward, wanted.max_reward),
            (SAMPLED, wanted.min_sampled, wanted.max_sampled),
        ):
            if low is not None or high is not None:
                values = self._column(column)  # NaN is within no bounds
                accepted &= (values >= (low if low is not None else -_LAST)) & (values <= (high if high is not None else _LAST))
        return np.flatnonzero(accepted)

    def _column(self, column: int) -> npt.NDArray[np.float64]:
        """Return the values of all rollouts, NaN where there is none; NaN is sorted to the end."""
        values = (numbers[column] for group in self._groups for numbers in group.numbers)
        return np.fromiter((value if isinstance(value, int | float) else np.nan for value in values), np.float64, self._total)
