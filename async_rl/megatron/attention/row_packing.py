"""The boundaries of a packed row, and what its layers share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.compat import PackedSeqParams


@dataclass
class RowPacking(PackedSeqParams):
    """Sequence boundaries of a row for one pass through the model (see `model.forward_packed`)."""

    positions: Tensor | None = None
    """Position of each token within its sequence; `forward_packed` sets it."""
    rotations: dict[Hashable, Rotation] = field(default_factory=dict[Hashable, Rotation], init=False, repr=False)

    def rotation(self, kind: Hashable, angles: Tensor, dtype: torch.dtype, factor: float) -> Rotation:
        """The rotation of the row's tokens in all layers of a kind; the first of them makes it."""
        assert self.positions is not None
        if kind not in self.rotations:
            self.rotations[kind] = Rotation.by(angles[self.positions], dtype, factor)
        return self.rotations[kind]
