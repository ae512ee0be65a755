"""Rotary position embeddings: the rotation that the learner and the engine share, and those of a model's two kinds of layers.

    y = x * cos + turned(x) * sin          turned((a, b)) = (-b, a)

Sine and cosine are looked up once for all layers of a row or step. Both sides round every product and sum, as Megatron and
transformers do: in half precision, fusing them would give the same weights other log-probabilities.
"""

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
    """Rotation of the tokens of one row or step."""

    cos: Tensor
    """[tokens, 1, 1, dim]"""
    sin: Tensor
    """The same; negated in the first half, so that the halves need only be exchanged."""

    @classmethod
    def by(cls, angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
        """From Megatron's angles [tokens, 1, 1, dim], whose halves are equal; `factor` multiplies sine and cosine."""
        first, second = (angles.sin() * factor).chunk(2, dim=-1)
        return cls(cos=(angles.cos() * factor).to(dtype), sin=torch.cat((-first, second), dim=-1).to(dtype))

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate [tokens, batch, heads, dim]."""
        if torch.is_grad_enabled() and heads.requires_grad:
            turned = _Turned.apply(heads, self.cos, self.sin)
            assert isinstance(turned, Tensor)
            return turned
        return (heads * self.cos).add_(_exchanged(heads).mul_(self.sin))


class _Turned(torch.autograd.Function):
    """A rotation, whose gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (heads * cos).add_(_exchanged(heads).mul_(sin))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (cos, sin) = gradients, ctx.saved_tensors
        return (gradient * cos).sub_(_exchanged(gradient).mul_(sin)), None, None


def _exchanged(heads: Tensor) -> Tensor:
    """A copy with the halves of each head exchanged."""
    return heads.roll(heads.shape[-1] // 2, dims=-1)


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
