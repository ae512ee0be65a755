"""Rotary positions in an engine step: angles become waves once, not once more in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of the tokens of one step, in their order."""

    cos: Tensor
    sin: Tensor
    """With the sign of the half that it multiplies."""

    @classmethod
    def at(cls, positions: Tensor, angles: Tensor, dtype: torch.dtype) -> Rotation:
        """`angles` [positions, 1, 1, dim], whose halves are equal, are Megatron's."""
        own = angles[positions]
        first, second = own.sin().chunk(2, dim=-1)
        return cls(cos=own.cos().to(dtype), sin=torch.cat((-first, second), dim=-1).to(dtype))

    def turn(self, heads: Tensor) -> Tensor:
        """[tokens, 1, heads, dim]: each half turned towards the other."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, dims=-1), self.sin)
