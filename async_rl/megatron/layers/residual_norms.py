"""An engine's residual sums, each with the norm that reads it next, as one kernel: decoding few requests waits for launches.

attention, MLP ──▶ sum ──▶ norm ──▶ MLP, attention of the next layer
                   └──────────────▶ next sum
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.compat import GPTModel
from async_rl.megatron.layers.norms import WIDEST, Norm


def fuse_residual_norms(model: GPTModel, device: torch.device) -> None:
    """For a model in evaluation, where its layers have kernels and plain norms."""
    layers: list[Any] = [*model.decoder.layers]
    following = [layer.input_layernorm for layer in layers[1:]] + [model.decoder.final_layernorm]
    for layer, norm_of_next in zip(layers, following, strict=True):
        if layer.self_attention.uses_kernels(device):
            layer.self_attn_bda = _summed_with(layer.pre_mlp_layernorm, layer.self_attn_bda)
            layer.mlp_bda = _summed_with(norm_of_next, layer.mlp_bda)


def _summed_with(norm: Any, plain: Any) -> Any:
    """Return the replacement for Megatron's `plain` sum before `norm`, or `plain` if the norm has no kernel."""
    return _ResidualNorm(norm) if type(norm) is Norm and len(norm.weight) <= WIDEST else plain


class _ResidualNorm:
    """Sums as Megatron's `get_bias_dropout_add` does in evaluation. `norm` then returns what was computed with the sum."""

    def __init__(self, norm: Norm) -> None:
        self._norm, self._plain = norm, norm.forward
        self._sum: Tensor | None = None
        self._normed: Tensor | None = None
        norm.forward = self._forward

    def __call__(self, _training: bool, _fused: bool) -> Any:
        return self._add

    def _add(self, made: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float) -> Tensor:
        from async_rl.megatron.layers.norm_kernels import add_and_norm  # late: not everyone has Triton

        given, bias = made
        given = given if bias is None else given + bias
        self._sum, self._normed = add_and_norm(given, residual, self._norm.weight, self._norm.eps)
        return self._sum

    def _forward(self, x: Tensor) -> Tensor:
        normed = self._normed if x is self._sum else None  # Megatron may have changed it
        self._sum = self._normed = None
        return normed if normed is not None else self._plain(x)
