"""Low-rank adapters in a model: a layer computes with W + alpha / rank x B A, and the gradients reach A and B alone.

The merged matrix is kept beside W and refreshed after each update, so that a rank computes with exactly what it hands out, and
Megatron's layers communicate as they do for any weight. Adapters are float32 in any precision of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from async_rl.config.learner import LoraConfig, LoraTarget
from async_rl.megatron.compat import GPTModel, copy_to_tensor_model_parallel_region
from async_rl.megatron.parameters.adapters import AdapterRows, adapters
from async_rl.megatron.parameters.full_parameters import initial_value, local_parameters, slice_for, tensor_rank
from async_rl.megatron.parameters.table import VALUE_HEAD, Parameter, Split
from async_rl.models.shape import ModelShape


class Factors(nn.Module):
    """One adapter's A and B, or this rank's parts of them."""

    def __init__(self, adapter: AdapterRows, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.target: LoraTarget = adapter.target
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.rows = adapter.a, adapter.b

    def in_graph(self) -> Iterator[Tensor]:
        """A and B. The gradient of one that is not divided is summed over tensor ranks, each of which has its part."""
        for factor, row in zip((self.lora_A, self.lora_B), self.rows, strict=True):
            yield copy_to_tensor_model_parallel_region(factor) if row.split is Split.WHOLE else factor


class AdaptedWeight(nn.Module):
    """The parametrization of a layer's `weight`."""

    def __init__(self, base: Tensor, factors: Iterable[Factors], shape: ModelShape, scale: float) -> None:
        super().__init__()
        self.factors = list(factors)
        for each in self.factors:
            self.add_module(each.target, each)
        self.shape, self.scale, self.is_merged = shape, scale, True
        self._base, self.merged = base.detach(), base.detach().clone()

    def forward(self, base: Tensor) -> Tensor:
        if not self.is_merged:
            return base
        in_graph = [factor for each in self.factors for factor in each.in_graph()]
        merged: Tensor = _Merged.apply(self, *in_graph)  # pyright: ignore[reportAssignmentType]
        return merged

    def refresh(self) -> None:
        """Merge again, after A, B or the base have changed."""
        factors: dict[LoraTarget, tuple[Tensor, Tensor]] = {each.target: (each.lora_A, each.lora_B) for each in self.factors}
        with torch.no_grad():
            self.merged.copy_(merge(self._base, factors, self.shape, self.scale))

    def merged_with(self, full: Callable[[Parameter], Tensor]) -> Tensor:
        """Return this rank's matrix merged with other adapters, which `full` returns whole."""
        factors: dict[LoraTarget, tuple[Tensor, Tensor]] = {}
        for each in self.factors:
            a, b = (_own_part(row, full(row)).to(self._base.device) for row in each.rows)
            factors[each.target] = a, b
        return merge(self._base, factors, self.shape, self.scale)


class _Merged(torch.autograd.Function):
    """The merged matrix as a function of A and B. Saves no tensors, because all rows of an update share the matrix."""

    @staticmethod
    def forward(ctx: Any, weight: AdaptedWeight, *_factors: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.merged.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight: AdaptedWeight = ctx.weight
        found: list[Tensor | None] = [None]
        for each in weight.factors:
            part = part_of(gradients[0], each.target, weight.shape).float().flatten(0, -2) * weight.scale
            found += [each.lora_B.T @ part, part @ each.lora_A.T]
        return tuple(found)


FactorsOfMatrix = Mapping[LoraTarget, tuple[Tensor, Tensor]]
"""A and B of the adapters of one matrix."""


def factors_by_matrix(trained: Mapping[str, Tensor], shape: ModelShape, lora: LoraConfig) -> dict[str, FactorsOfMatrix]:
    """Sort full adapters, given by canonical name, by the matrix that they adapt."""
    found: dict[str, dict[LoraTarget, tuple[Tensor, Tensor]]] = defaultdict(dict)
    for each in adapters(shape, lora):
        found[each.matrix][each.target] = trained[each.a.name], trained[each.b.name]
    return dict(found)


def merge(base: Tensor, factors: FactorsOfMatrix, shape: ModelShape, scale: float) -> Tensor:
    """Return the matrix with its adapters merged, computed in float32 and rounded to the base's dtype."""
    merged = base.detach().clone()
    for target, (a, b) in factors.items():
        part = part_of(merged, target, shape)
        part.copy_(part.float() + (b @ a * scale).view_as(part))
    return merged


def part_of(matrix: Tensor, target: LoraTarget, shape: ModelShape) -> Tensor:
    """View of a matrix's rows, or of this rank's, that belong to a matrix of Hugging Face's; [..., columns]."""
    queries, head = shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim
    by_group = matrix.view(-1, queries + 2 * head, matrix.shape[1]) if target in ("q_proj", "k_proj", "v_proj") else matrix
    match target:
        case "q_proj":
            return by_group[:, :queries]
        case "k_proj":
            return by_group[:, queries : queries + head]
        case "v_proj":
            return by_group[:, queries + head :]
        case "gate_proj":
            return matrix.chunk(2)[0]
        case "up_proj":
            return matrix.chunk(2)[1]
        case "o_proj" | "down_proj":
            return matrix


def attach(chunks: Sequence[GPTModel], shape: ModelShape, lora: LoraConfig, *, seed: int) -> dict[str, AdaptedWeight]:
    """Give a model adapters with initial weights and freeze the rest but a value head; what is trained is float32.

    Returns the adapted weights by the canonical names of their matrices.
    """
    of_matrix: dict[str, list[AdapterRows]] = defaultdict(list)
    for adapter in adapters(shape, lora):
        of_matrix[adapter.matrix].append(adapter)
    model, adapted = nn.ModuleList(chunks), dict[str, AdaptedWeight]()
    owners = {id(own): module for module in model.modules() for own in module.parameters(recurse=False)}
    for name, own in local_parameters(model).items():
        own.requires_grad_(name in VALUE_HEAD)
        if name in VALUE_HEAD:
            own.data = own.data.float()
        if name in of_matrix:
            factors = [_factors(adapter, seed, own.device) for adapter in of_matrix[name]]
            adapted[name] = AdaptedWeight(own, factors, shape, lora.scale)
            parametrize.register_parametrization(owners[id(own)], "weight", adapted[name], unsafe=True)
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_with_gradient)
    return adapted


def _factors(adapter: AdapterRows, seed: int, device: torch.device) -> Factors:
    a, b = (_own_part(row, initial_value(row, seed)).to(device, copy=True) for row in (adapter.a, adapter.b))
    return Factors(adapter, a, b)


def _own_part(row: Parameter, full: Tensor) -> Tensor:
    return slice_for(full, row.split, *tensor_rank()).contiguous()


def _with_gradient(_embedding: nn.Module, _given: object, hidden: Tensor) -> Tensor:
    """Recomputed layers have gradients only if their input has one, and the embedding is frozen."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


@contextmanager
def base_alone(adapted: Iterable[AdaptedWeight]) -> Iterator[None]:
    """Compute without the adapters while inside."""
    for each in (weights := list(adapted)):
        each.is_merged = False
    try:
        yield
    finally:
        for each in weights:
            each.is_merged = True
