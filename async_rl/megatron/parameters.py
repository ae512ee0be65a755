"""Full parameters under layout-free names, and how ranks divide them: one table drives initialising, gathering and loading.

A canonical name is Megatron's own with the layer's number in the whole model, at full size: no padding of the vocabulary,
no tensor slices. Weight pushes, Hugging Face folders and tests speak of these only.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parallel import pipeline_group, tensor_group
from async_rl.model_shape import ModelShape
from async_rl.parameter_spec import ParameterSpec


class Split(Enum):
    """How tensor-parallel ranks divide a parameter."""

    WHOLE = "every rank holds all of it"
    ROWS = "dimension 0; query-key-value rows stand group by group, so that equal parts are whole groups"
    GATED = "dimension 0 of each half: the gate's rows, then the up projection's"
    COLUMNS = "dimension 1"
    VOCABULARY = "dimension 0, padded with zero rows until ranks get equal parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One row of the table."""

    name: str
    shape: tuple[int, ...]
    split: Split
    initial: float | Literal["ones", "zeros"]
    """A number is the standard deviation of normal weights."""
    layer: int | None = None


def table(shape: ModelShape) -> list[Parameter]:
    """Every parameter of the model, in the order in which data flows through it."""
    hidden, std = shape.hidden, shape.init_std
    vocabulary = (shape.vocab_size, hidden)
    rows = [Parameter(name=EMBEDDING, shape=vocabulary, split=Split.VOCABULARY, initial=std)]
    for layer in range(shape.layers):
        rows += _layer(shape, layer)
    rows.append(Parameter(name="decoder.final_layernorm.weight", shape=(hidden,), split=Split.WHOLE, initial="ones"))
    if not shape.tied_embeddings:
        rows.append(Parameter(name=OUTPUT, shape=vocabulary, split=Split.VOCABULARY, initial=std))
    return rows


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def _layer(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    hidden, head, ffn = shape.hidden, shape.head_dim, shape.ffn
    queries, qkv = shape.heads * head, (shape.heads + 2 * shape.kv_heads) * head
    # The two matrices that write into the residual stream start smaller, so that its variance does not grow with depth.
    residual_std = shape.init_std / math.sqrt(2 * shape.layers)

    def row(name: str, sizes: tuple[int, ...], split: Split, initial: float | Literal["ones", "zeros"]) -> Parameter:
        return Parameter(name=f"decoder.layers.{layer}.{name}", shape=sizes, split=split, initial=initial, layer=layer)

    yield row("input_layernorm.weight", (hidden,), Split.WHOLE, "ones")
    yield row("self_attention.linear_qkv.weight", (qkv, hidden), Split.ROWS, shape.init_std)
    if shape.qkv_bias:
        yield row("self_attention.linear_qkv.bias", (qkv,), Split.ROWS, "zeros")
    if shape.qk_norm:
        yield row("self_attention.q_layernorm.weight", (head,), Split.WHOLE, "ones")
        yield row("self_attention.k_layernorm.weight", (head,), Split.WHOLE, "ones")
    yield row("self_attention.linear_proj.weight", (hidden, queries), Split.COLUMNS, residual_std)
    yield row("pre_mlp_layernorm.weight", (hidden,), Split.WHOLE, "ones")
    yield row("mlp.linear_fc1.weight", (2 * ffn, hidden), Split.GATED, shape.init_std)
    yield row("mlp.linear_fc2.weight", (hidden, ffn), Split.COLUMNS, residual_std)


def specs(shape: ModelShape, dtype: torch.dtype) -> list[ParameterSpec]:
    """What a push of this model's weights consists of, in order."""
    name_of_dtype = str(dtype).removeprefix("torch.")
    return [ParameterSpec(name=row.name, shape=row.shape, dtype=name_of_dtype) for row in table(shape)]


def padded_vocab(shape: ModelShape, tensor_ranks: int) -> int:
    return -(-shape.vocab_size // tensor_ranks) * tensor_ranks


# -- slicing ------------------------------------------------------------------------------------------------------------


def slice_for(full: Tensor, split: Split, rank: int, ranks: int) -> Tensor:
    """What tensor rank `rank` of `ranks` holds of a full parameter."""
    if split is Split.WHOLE or ranks == 1:
        return full
    if split is Split.COLUMNS:
        return full.chunk(ranks, dim=1)[rank]
    if split is Split.GATED:
        gate, up = full.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    if split is Split.VOCABULARY and (missing := -len(full) % ranks):
        full = torch.cat([full, full.new_zeros(missing, *full.shape[1:])])
    return full.chunk(ranks)[rank]


def join(slices: list[Tensor], split: Split, shape: tuple[int, ...]) -> Tensor:
    """The full parameter, from what the tensor ranks hold."""
    if split is Split.WHOLE:
        return slices[0]
    if split is Split.COLUMNS:
        return torch.cat(slices, dim=1)
    if split is Split.GATED:
        halves = [part.chunk(2) for part in slices]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(slices)[: shape[0]]


# -- a live model -------------------------------------------------------------------------------------------------------

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine keeps the norms inside the linear layers that follow them."""


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name. On a last stage with tied embeddings, the copy of the embedding is OUTPUT."""
    while not hasattr(model, "decoder"):
        model = model.module  # pyright: ignore[reportAssignmentType]  # Megatron's wrappers all call it that
    layers: nn.ModuleList = model.decoder.layers  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    first = int(layers[0].layer_number) - 1 if len(layers) else 0  # pyright: ignore[reportArgumentType]
    return {_canonical(name, first): parameter for name, parameter in model.named_parameters()}


def _canonical(name: str, first_layer: int) -> str:
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if found is None:
        return name
    rest = _FUSED_NORMS.get(found[2], found[2])
    return f"decoder.layers.{int(found[1]) + first_layer}.{rest}"


def _targets(model: nn.Module, shape: ModelShape) -> Iterator[tuple[Parameter, nn.Parameter]]:
    """The table's rows that have a parameter on this rank; a tied embedding can have two."""
    local = local_parameters(model)
    for row in table(shape):
        if (own := local.pop(row.name, None)) is not None:
            yield row, own
        if row.name == EMBEDDING and shape.tied_embeddings and (copy := local.pop(OUTPUT, None)) is not None:
            yield row, copy
    if local:
        raise ValueError(f"the model has parameters that its shape does not explain: {', '.join(sorted(local))}")


def initialize_parameters(model: nn.Module, shape: ModelShape, *, seed: int) -> None:
    """Fill with initial weights that are the same for every division among ranks: each name has its own generator."""
    rank, ranks = _tensor_rank()
    with torch.no_grad():
        for row, own in _targets(model, shape):
            own.copy_(slice_for(_initial(row, seed), row.split, rank, ranks))


def _initial(row: Parameter, seed: int) -> Tensor:
    if row.initial == "ones":
        return torch.ones(row.shape)
    if row.initial == "zeros":
        return torch.zeros(row.shape)
    # torch's CPU generator looks at 32 bits of a seed only, so both parts must be mixed into those.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {row.name}".encode()))
    return torch.randn(row.shape, generator=generator) * row.initial


def load_full(model: nn.Module, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Copy full parameters into the live ones, each rank its own part; no parameter moves in memory."""
    check_complete(shape, tensors)
    rank, ranks = _tensor_rank()
    with torch.no_grad():
        for row, own in _targets(model, shape):
            own.copy_(slice_for(tensors[row.name], row.split, rank, ranks))


def check_complete(shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless `tensors` are exactly this model's parameters."""
    wanted = {row.name: row.shape for row in table(shape)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        first = wrong[0]
        raise ValueError(
            f"{len(wrong)} parameters do not fit the model, the first is {first}: "
            f"expected {wanted.get(first, 'none')}, found {found.get(first, 'none')}"
        )


def gather_full(model: nn.Module, shape: ModelShape) -> dict[str, Tensor] | None:
    """A snapshot of all full parameters on rank 0; None on the others. Every rank must call it.

    The tensors are copies: training on does not change them.
    """
    if parallel_state.get_data_parallel_rank() != 0:
        return None
    own = {row.name: parameter.detach() for row, parameter in _targets(model, shape)}
    receives = dist.get_rank() == 0
    gathered: dict[str, Tensor] = {}
    for row in table(shape):
        full = _join_tensor_ranks(own[row.name], row) if row.name in own and _owns(row, shape) else None
        if (arrived := _to_first_stage(full, row, shape, model)) is not None and receives:
            gathered[row.name] = arrived
    return gathered if receives else None


def _tensor_rank() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _stage_of(row: Parameter, shape: ModelShape) -> int:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if row.layer is not None:
        return row.layer * stages // shape.layers
    return 0 if row.name == EMBEDDING else stages - 1


def _owns(row: Parameter, shape: ModelShape) -> bool:
    return parallel_state.get_pipeline_model_parallel_rank() == _stage_of(row, shape)


def _join_tensor_ranks(own: Tensor, row: Parameter) -> Tensor | None:
    """The full parameter on tensor rank 0."""
    rank, ranks = _tensor_rank()
    if ranks == 1 or row.split is Split.WHOLE:
        return own.clone() if rank == 0 else None
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own.contiguous(), group=tensor_group())
    return join(parts, row.split, row.shape) if rank == 0 else None


def _to_first_stage(full: Tensor | None, row: Parameter, shape: ModelShape, model: nn.Module) -> Tensor | None:
    """Between tensor rank 0 of the stage that owns a parameter and that of the first stage."""
    owner = _stage_of(row, shape)
    if owner == 0 or _tensor_rank()[0] != 0:
        return full
    group, stage = pipeline_group(), parallel_state.get_pipeline_model_parallel_rank()
    if stage == owner:
        assert full is not None
        dist.send(full.contiguous(), group=group, group_dst=0)
    elif stage == 0:
        like = next(model.parameters())
        full = torch.empty(row.shape, dtype=like.dtype, device=like.device)
        dist.recv(full, group=group, group_src=owner)
    return full
