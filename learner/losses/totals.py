"""What a loss reports about a step: named sums and maxima that merge exactly over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalNames:
    """Known before anything is computed, so that a rank with nothing to report can still take part in the reduction."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Two vectors, so that a whole step is reduced with one sum and one maximum."""

    names: TotalNames
    sums: Tensor
    maxima: Tensor

    @staticmethod
    def empty(names: TotalNames, device: torch.device | None = None) -> Totals:
        return Totals(
            names=names,
            sums=torch.zeros(len(names.sums), dtype=torch.float64, device=device),
            maxima=torch.zeros(len(names.maxima), dtype=torch.float64, device=device),
        )

    @staticmethod
    def of(names: TotalNames, sums: Mapping[str, Tensor]) -> Totals:
        """From one number for each name, in any order. Without maxima."""
        summed = torch.stack([sums[name].detach().double() for name in names.sums])
        return Totals(names=names, sums=summed, maxima=summed.new_zeros(0))

    def merged(self, other: Totals) -> Totals:
        return Totals(names=self.names, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    @staticmethod
    def averaged(several: Sequence[Totals]) -> Totals:
        """Of several updates, what one of them comes to. Whatever divides one sum by another is then that of all of them."""
        together = reduce(Totals.merged, several)
        return replace(together, sums=together.sums / len(several))

    def sum_of(self, name: str) -> float:
        return float(self.sums[self.names.sums.index(name)])

    def maximum_of(self, name: str) -> float:
        return float(self.maxima[self.names.maxima.index(name)])
