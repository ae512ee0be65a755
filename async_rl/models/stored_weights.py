"""Full parameters that are read one at a time on access, so that a large model is not in memory twice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor


class StoredWeights(Mapping[str, Tensor]):
    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name, without reading tensors."""
