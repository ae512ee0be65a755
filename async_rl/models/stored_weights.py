"""Full parameters that are put together when they are asked for: nobody needs all of a large model twice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor


class StoredWeights(Mapping[str, Tensor]):
    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name, without reading anything."""
