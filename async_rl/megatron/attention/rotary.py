"""Rotary position embedding of an engine step, with sine and cosine computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation of the tokens of one step."""

    cos: Tensor
    sin: Tensor
    """Negated in the first half."""

    @classmethod
    def at(cls, positions: Tensor, angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
        """From Megatron's `angles` [positions, 1, 1, dim], whose halves are equal; `factor` multiplies sine and cosine."""
        own = angles[positions]
        first, second = (own.sin() * factor).chunk(2, dim=-1)
        return cls(cos=(own.cos() * factor).to(dtype), sin=torch.cat((-first, second), dim=-1).to(dtype))

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate [tokens, 1, heads, dim]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, dims=-1), self.sin)
