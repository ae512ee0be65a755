"""Norms of the local layers: before, after and inside the attention and the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.megatron.compat import (
    GPTModel,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from async_rl.megatron.triton_kernels import has_kernels
from async_rl.models.shape import ModelShape

WIDEST = 8192
"""Numbers of a row that the kernel of the backward pass holds."""


class Norm(nn.RMSNorm):
    """torch's RMSNorm, marked for sequence parallelism so that Megatron sums its gradients over tensor ranks."""

    eps: float  # pyright: ignore[reportIncompatibleVariableOverride]  # torch's may be None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and len(self.weight) <= WIDEST and self.uses_kernels(x)):
            return super().forward(x)
        from async_rl.megatron.layers.norm_kernels import RmsNorm  # late: not everyone has Triton

        return RmsNorm.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]

    @staticmethod
    def uses_kernels(x: Tensor) -> bool:
        """Whether the backward pass is a Triton kernel, which computes in float32."""
        return x.dtype is not torch.float64 and has_kernels(x.device)


class CenteredNorm(Norm):
    """RMSNorm that multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class _ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a token, of which a tensor rank holds some."""

    def __init__(self, config: TransformerConfig, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self._width, self._eps, self._ranks = heads * head_dim, eps, config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(self._width // self._ranks))

    def forward(self, heads: Tensor) -> Tensor:
        """[..., heads of this rank, dim] -> same shape."""
        flat = heads.flatten(-2).float()
        squares = flat.square().sum(dim=-1, keepdim=True)
        if self._ranks > 1:  # the sum over ranks, in the backward pass too
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(squares / self._width + self._eps)
        return (normed * self.weight.float()).to(heads.dtype).view_as(heads)


class QueryNorm(_ProjectionNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(_ProjectionNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        assert config.num_query_groups is not None
        super().__init__(config, config.num_query_groups, hidden_size, eps)


def norm_of(shape: ModelShape) -> type[Norm]:
    return CenteredNorm if shape.centered_norms else Norm


def attach_post_norms(model: GPTModel, shape: ModelShape) -> None:
    """Norm the outputs of attention and MLP, by hooks on their last matrices: Megatron's layers have no place for it."""
    if shape.norms == "before":
        return
    for layer in model.decoder.layers:
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):  # pyright: ignore[reportAttributeAccessIssue]
            linear.post_layernorm = norm_of(shape)(model.config, shape.hidden, shape.norm_eps)  # pyright: ignore
            linear.register_forward_hook(_normed)  # pyright: ignore


def _normed(linear: Any, _given: tuple[Any, ...], made: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    output, bias = made
    return linear.post_layernorm(output), bias
