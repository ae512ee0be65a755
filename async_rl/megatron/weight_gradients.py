"""Gradients of the matrices of Megatron's own layers, added to the gradient buffers in the product and in float32.

Without it a product is written, in the dtype of the model, and then read again to be added. Megatron calls an extension of Apex
for this; `install` makes it call `accumulate` where that extension is missing.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import ColumnParallelLinear, RowParallelLinear
from async_rl.megatron.products import add_product_, factor

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def accumulate(given: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add a matrix's gradient to `total` [out, in]. `given` [tokens, in]: what it multiplied. `gradient` [tokens, out]: that of
    the product.
    """
    add_product_(total, factor(gradient).t(), factor(given))


def install() -> None:
    """Stand in for Apex's extension; an installed one stays. Gradient buffers are float32, so Megatron calls no other."""
    layers = vars(importlib.import_module("megatron.core.tensor_parallel.layers"))
    layers.setdefault(_EXTENSION, SimpleNamespace(wgrad_gemm_accum_fp32=accumulate))
    layers["_grad_accum_fusion_available"] = True  # layers refuse to be built with `gradient_accumulation_fusion` otherwise


def add_in_products(model: nn.Module) -> None:
    """Make the linear layers of a model add to their gradient buffers, which frozen and adapted weights do not have.

    Autograd then brings placeholders for these gradients, as it does for the output layer's (heads/chunked_logits.py).
    """
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and _gains(layer.weight):
            layer.gradient_accumulation_fusion = True


def _gains(weight: Tensor | None) -> bool:
    """Whether it has a buffer, and adding needs no copies: a CPU would first copy factors in half precision to float32."""
    total: Tensor | None = getattr(weight, "main_grad", None)
    if weight is None or total is None or total.dtype is not torch.float32:
        return False
    return weight.is_cuda or weight.dtype is torch.float32
