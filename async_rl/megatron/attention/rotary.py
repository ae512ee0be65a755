"""Rotary position embeddings: those of a model's two kinds of layers, and that of an engine step, computed once for all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import GPTModel, RotaryEmbedding


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


class JoinedRotary(nn.Module):
    """Angles of two rotary embeddings side by side, [positions, 1, 1, 2 * dim]; SelfAttentionOfLayer takes its half."""

    def __init__(self, everywhere: RotaryEmbedding, in_window: RotaryEmbedding) -> None:
        super().__init__()
        self.everywhere, self.in_window = everywhere, in_window
        self.get_rotary_seq_len = everywhere.get_rotary_seq_len
        self._joined = lru_cache(maxsize=8)(self._join)  # the engine asks for all positions in every step

    def forward(self, *args: Hashable, **kwargs: Hashable) -> Tensor:
        return self._joined(*args, **kwargs)

    def _join(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([self.everywhere(*args, **kwargs), self.in_window(*args, **kwargs)], dim=-1)


def join_rotary(model: GPTModel, theta: float) -> None:
    """Give the layers with a window a rotary embedding of their own base."""
    everywhere: Any = model.rotary_pos_emb
    in_window = RotaryEmbedding(
        model.config.kv_channels,  # pyright: ignore[reportArgumentType]
        rotary_percent=1.0,
        rotary_base=theta,  # pyright: ignore[reportArgumentType]  # annotated int, used as a float
        use_cpu_initialization=model.config.use_cpu_initialization,
    )
    model.rotary_pos_emb = JoinedRotary(everywhere, in_window)  # pyright: ignore[reportAttributeAccessIssue]
