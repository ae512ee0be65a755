"""All experts of a rank at once, by torch's grouped matrix product, without Transformer Engine.

The experts keep weights of their own, as gradient buffers and the optimizer need them; they are put side by side for a product
and dropped after it, in the backward pass again. Each expert's tokens are padded to a multiple of 8, where kernels begin.

Run on one H200, for small models: docs/gpu.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.megatron.layers.swiglu import FusedSwiglu
from async_rl.models.shape import ModelShape

with host.importing():
    from megatron.core.transformer.moe.experts import SequentialMLP

ALIGNED = 8
"""Numbers in bfloat16 that have 16 bytes, where the kernels' loads begin."""
NEEDED_CAPABILITY = (9, 0)


def fits_grouped_products(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of this device compute the model's experts."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return are_aligned(shape) and torch.cuda.get_device_capability(device) >= NEEDED_CAPABILITY


def are_aligned(shape: ModelShape) -> bool:
    """Whether the rows of the experts' matrices begin where the kernels can load."""
    experts = shape.experts
    return experts is not None and shape.activation == "silu" and shape.hidden % ALIGNED == experts.ffn % ALIGNED == 0


class GroupedExperts(SequentialMLP):
    """Megatron's experts, computed together."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        tokens, given = permuted_local_hidden_states.shape[0], permuted_local_hidden_states
        places, ends, rows = padded_places(tokens_per_expert.to(given.device), tokens)
        padded = given.new_zeros(rows, given.shape[1]).index_copy(0, places, given)
        first, second = (self._weights(name) for name in ("linear_fc1", "linear_fc2"))
        inside = FusedSwiglu()(GroupedProduct.apply(padded, ends, *first))
        shares = permuted_probs.new_zeros(rows).index_copy(0, places, permuted_probs)
        weighted = (inside * shares[:, None]).to(inside.dtype)
        out: Any = GroupedProduct.apply(weighted, ends, *second)
        return out.index_select(0, places), None

    def _weights(self, name: str) -> list[Tensor]:
        return [_matrix(expert, name) for expert in self.local_experts]


def _matrix(expert: nn.Module, name: str) -> Tensor:
    return getattr(expert, name).weight


def padded_places(counts: Tensor, tokens: int) -> tuple[Tensor, Tensor, int]:
    """Return the place of each token among padded groups, the ends of these, and how many rows they have at most: the device
    alone knows what they have.
    """
    padded = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
    ends = padded.cumsum(0)
    shifts = ends - padded - (counts.cumsum(0) - counts)
    places = torch.arange(tokens, device=counts.device) + shifts.repeat_interleave(counts, output_size=tokens)
    rows = (tokens + len(counts) * (ALIGNED - 1) + ALIGNED - 1) // ALIGNED * ALIGNED
    return places, ends.to(torch.int32), rows


class GroupedProduct(torch.autograd.Function):
    """[rows, in] times the transposed [out, in] of each row's expert; rows behind the last end are 0."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(given, ends, *weights)
        out = torch._grouped_mm(given, torch.stack(weights).transpose(1, 2), offs=ends)  # pyright: ignore[reportPrivateImportUsage]
        return _cleared(out, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_given = _cleared(torch._grouped_mm(gradient, torch.stack(weights), offs=ends), ends)  # pyright: ignore[reportPrivateImportUsage]
        if not any(ctx.needs_input_grad[2:]):
            return of_given, None, *[None] * len(weights)
        of_weights = torch._grouped_mm(gradient.transpose(0, 1), given, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
        return of_given, None, *of_weights.unbind(0)


def _cleared(rows: Tensor, ends: Tensor) -> Tensor:
    """Set what no group covers to 0: kernels leave it as it was."""
    return rows.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1])[:, None], 0)
