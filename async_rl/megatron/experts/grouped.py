"""All experts of a rank at once, by torch's grouped matrix product, without Transformer Engine.

The experts keep weights of their own, as gradient buffers and the optimizer need them. These lie one behind the other, where
products read them without a copy; Megatron's distributed optimizer moves them to its buffer, the last one first. Each expert's
tokens are padded to a multiple of 8, where kernels begin.

Run on one H200, for small models: docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.megatron.layers.swiglu import FusedSwiglu
from async_rl.megatron.triton_kernels import has_kernels, has_triton
from async_rl.models.shape import ModelShape

with host.importing():
    from megatron.core.transformer.moe.experts import SequentialMLP

ALIGNED = 8
"""Numbers in bfloat16 that have 16 bytes, where the kernels' loads begin."""
NEEDED_CAPABILITY = (9, 0)


def fits_grouped_products(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of this device compute the model's experts."""
    return what_is_missing(shape, device, dtype) is None


def what_is_missing(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels of this device do not compute the model's experts; None: they do."""
    if device.type != "cuda":
        return "no GPU"
    if not has_triton():
        return "Triton is not installed, which has the activation"
    if not has_kernels(device):
        return "no kernels are wanted (learner.kernels: torch)"
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped products"
    if dtype is not torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, needed is bfloat16"
    if not are_aligned(shape):
        return f"hidden and expert sizes must be multiples of {ALIGNED}, and the activation SwiGLU"
    found = torch.cuda.get_device_capability(device)
    return None if found >= NEEDED_CAPABILITY else f"capability {_dotted(found)}, needed is {_dotted(NEEDED_CAPABILITY)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def are_aligned(shape: ModelShape) -> bool:
    """Whether the rows of the experts' matrices begin where the kernels can load."""
    experts = shape.experts
    return experts is not None and shape.activation == "silu" and shape.hidden % ALIGNED == experts.ffn % ALIGNED == 0


class GroupedExperts(SequentialMLP):
    """Megatron's experts, computed together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts: Sequence[Any] = [*self.local_experts]
        self._matrices = [each.linear_fc1.weight for each in experts], [each.linear_fc2.weight for each in experts]
        for matrices in self._matrices:
            lay_in_a_row(matrices)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        tokens, given = permuted_local_hidden_states.shape[0], permuted_local_hidden_states
        last_is_first = lie_backwards(self._matrices[0])
        first, second = (each[::-1] if last_is_first else each for each in self._matrices)
        places, ends, rows = padded_places(tokens_per_expert.to(given.device), tokens, last_is_first=last_is_first)
        # in an engine a tensor ends with the last name that it has
        inside = FusedSwiglu()(GroupedProduct.apply(_placed(given, places, rows), ends, *first))
        weighted = (inside * _placed(permuted_probs, places, rows)[:, None]).to(inside.dtype)
        del inside
        out: Any = GroupedProduct.apply(weighted, ends, *second)
        del weighted
        return out.index_select(0, places), None


def _placed(given: Tensor, places: Tensor, rows: int) -> Tensor:
    return given.new_zeros(rows, *given.shape[1:]).index_copy_(0, places, given)


def lay_in_a_row(matrices: Sequence[nn.Parameter]) -> None:
    """Move matrices of one shape into one tensor, one behind the other. What is copied into them later stays there."""
    for matrix, place in zip(matrices, torch.stack([each.data for each in matrices]), strict=True):
        matrix.data = place


def lie_backwards(matrices: Sequence[Tensor]) -> bool:
    """Whether the last of these parts of one buffer comes first."""
    return matrices[-1].storage_offset() < matrices[0].storage_offset()


def in_a_row(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape as one tensor [number, rows, columns]: where they are if they lie in one buffer at equal
    distances, else as a copy.
    """
    first, last = matrices[0], matrices[-1]
    offsets = [each.storage_offset() for each in matrices]
    distance = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    are_even = distance >= first.numel() and offsets == [*range(offsets[0], offsets[-1] + 1, distance)]
    if not are_even or first.untyped_storage()._cdata != last.untyped_storage()._cdata:
        return torch.stack([*matrices])
    return first.as_strided((len(matrices), *first.shape), (distance, *first.stride()))


def padded_places(counts: Tensor, tokens: int, *, last_is_first: bool = False) -> tuple[Tensor, Tensor, int]:
    """Return the place of each token among padded groups, the ends of these, and how many rows they have at most: the device
    alone knows what they have. `last_is_first`: the groups are in the reverse order of `counts`.
    """
    padded = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
    sizes = padded.flip(0) if last_is_first else padded
    ends = sizes.cumsum(0)
    starts = ends - sizes
    shifts = (starts.flip(0) if last_is_first else starts) - (counts.cumsum(0) - counts)
    places = torch.arange(tokens, device=counts.device) + shifts.repeat_interleave(counts, output_size=tokens)
    rows = (tokens + len(counts) * (ALIGNED - 1) + ALIGNED - 1) // ALIGNED * ALIGNED
    return places, ends.to(torch.int32), rows


class GroupedProduct(torch.autograd.Function):
    """[rows, in] times the transposed [out, in] of each row's expert; rows behind the last end are 0."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(given, ends, *weights)
        out = torch._grouped_mm(given, in_a_row(weights).transpose(1, 2), offs=ends)  # pyright: ignore[reportPrivateImportUsage]
        return _cleared(out, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_given = _cleared(torch._grouped_mm(gradient, in_a_row(weights), offs=ends), ends)  # pyright: ignore[reportPrivateImportUsage]
        if not any(ctx.needs_input_grad[2:]):
            return of_given, None, *[None] * len(weights)
        of_weights = torch._grouped_mm(gradient.transpose(0, 1), given, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
        return of_given, None, *of_weights.unbind(0)


def _cleared(rows: Tensor, ends: Tensor) -> Tensor:
    """Set what no group covers to 0: kernels leave it as it was."""
    return rows.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1])[:, None], 0)
