"""Named sums and maxima of a step that merge exactly over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalNames:
    """Names of sums and maxima, fixed in advance so that a rank without rows can take part in the reduction."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...] = ()
    describe: Callable[[Totals], dict[str, float]]
    """Turns totals with these names into metrics."""

    def under(self, prefix: str) -> TotalNames:
        """Return the same names with metrics called `prefix/...`."""
        return replace(self, describe=lambda totals: {f"{prefix}/{name}": each for name, each in self.describe(totals).items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Sums and maxima as two vectors, so that a step is reduced with two collectives."""

    names: TotalNames
    sums: Tensor
    maxima: Tensor

    @staticmethod
    def empty(names: TotalNames) -> Totals:
        sums, maxima = (torch.zeros(len(each), dtype=torch.float64) for each in (names.sums, names.maxima))
        return Totals(names=names, sums=sums, maxima=maxima)

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

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics, if these are the totals of a whole update."""
        return self.names.describe(self)

    def by_name(self) -> dict[str, float]:
        return dict(zip(self.names.sums, self.sums.tolist(), strict=True))

    def sum_of(self, name: str) -> float:
        return float(self.sums[self.names.sums.index(name)])

    def maximum_of(self, name: str) -> float:
        return float(self.maxima[self.names.maxima.index(name)])
