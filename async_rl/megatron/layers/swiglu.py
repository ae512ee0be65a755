"""The activation of gated MLPs as one kernel on a GPU: a module that Megatron's MLPs call on all that `linear_fc1` gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.megatron.compat import TransformerConfig
from async_rl.megatron.triton_kernels import has_kernels
from async_rl.models.shape import ModelShape


def fuses_swiglu(shape: ModelShape, device: torch.device) -> bool:
    """Whether the model's activation is SwiGLU and the device has the kernel."""
    return shape.activation == "silu" and has_kernels(device)


class FusedSwiglu(nn.Module):
    """silu(left half) * right half, of the last dimension."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()

    def forward(self, given: Tensor) -> Tensor:
        if has_kernels(given.device):
            from async_rl.megatron.layers.swiglu_kernels import Swiglu

            return Swiglu.apply(given)  # pyright: ignore[reportReturnType]
        left, right = given.chunk(2, dim=-1)
        return functional.silu(left) * right
