"""Which rows are posed when. A curriculum is a list of stages; each gives every row a weight.

def easy_first():
    return [CurriculumStage(tasks=1000, weight=lambda row: row["level"] == 1), CurriculumStage(weight=lambda row: row["level"])]
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from async_rl.datasets.order import Epochs, chance
from async_rl.datasets.rows import Row, Rows
from async_rl.errors import ConfigError
from async_rl.imports.old_names import old_names


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumStage:
    """One stage of a curriculum."""

    tasks: int | None = None
    """Number of tasks; None means no end. The last stage never ends."""
    weight: Callable[[Row], float]
    """Weight of a row; 0 or False leaves it out. Equal weights pose whole epochs, unequal ones are weighted random draws."""


RowOrder = Callable[[int], int]
"""Returns the row of the index-th task."""


class CurriculumOrder:
    """The stages one after the other. Weights are computed once, when the dataset is opened."""

    def __init__(self, rows: Rows, stages: Sequence[CurriculumStage], *, seed: str, is_shuffled: bool) -> None:
        if not stages or any(stage.tasks is None or stage.tasks < 1 for stage in stages[:-1]):
            raise ConfigError("a curriculum needs stages, and each but the last needs tasks, at least 1")
        self._begins = [0, *accumulate(stage.tasks for stage in stages[:-1] if stage.tasks is not None)]
        self._chosen: list[array[int]] = []
        self._orders: list[RowOrder] = []
        for number, stage in enumerate(stages):
            weights = [float(stage.weight(rows[row])) for row in range(len(rows))]
            chosen = array("Q", (row for row, weight in enumerate(weights) if weight > 0))
            if not chosen:
                raise ConfigError(f"stage {number} of the curriculum leaves out every row")
            self._chosen.append(chosen)
            self._orders.append(_order([weights[row] for row in chosen], f"{seed}/{number}", is_shuffled))

    def row(self, index: int) -> int:
        stage = bisect_right(self._begins, index) - 1
        return self._chosen[stage][self._orders[stage](index - self._begins[stage])]


def _order(weights: Sequence[float], seed: str, is_shuffled: bool) -> RowOrder:
    if len(set(weights)) == 1:
        return Epochs(len(weights), seed=seed, is_shuffled=is_shuffled).row
    reached = list(accumulate(weights))
    return lambda index: bisect_right(reached, chance(f"{seed}/{index}") * reached[-1])


__getattr__ = old_names(__name__)
