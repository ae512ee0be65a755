"""Named sums and maxima of a step that merge exactly over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalNames:
    """Names of sums and maxima, fixed in advance so that a rank without rows can take part in the reduction."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Sums and maxima as two vectors, so that a step is reduced with two collectives."""

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
        """Build totals from one scalar per name, without maxima."""
        summed = torch.stack([sums[name].detach().double() for name in names.sums])
        return Totals(names=names, sums=summed, maxima=summed.new_zeros(0))

    def merged(self, other: Totals) -> Totals:
        return Totals(names=self.names, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    @staticmethod
    def averaged(several: Sequence[Totals]) -> Totals:
        """Average the sums of several updates and take the maxima; ratios of sums are then those over all updates."""
        together = reduce(Totals.merged, several)
        return replace(together, sums=together.sums / len(several))

    def sum_of(self, name: str) -> float:
        return float(self.sums[self.names.sums.index(name)])

    def maximum_of(self, name: str) -> float:
        return float(self.maxima[self.names.maxima.index(name)])
