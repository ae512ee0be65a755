"""Initialises, loads and divides the full parameters of a model that is sharded over ranks, by canonical name."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parameters.adapters import is_adapter
from async_rl.megatron.parameters.table import EMBEDDING, FUSED_NORMS, OUTPUT, Parameter, Split, table
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import ModelShape
from async_rl.models.stored_weights import StoredWeights
from async_rl.transport.bulk_copy import copy_all
from async_rl.transport.gpu_stream import transport_stream
from async_rl.transport.plan import Box


def specs(shape: ModelShape, dtype: torch.dtype) -> list[ParameterSpec]:
    """The parameters of a weight push, in order."""
    name_of_dtype = str(dtype).removeprefix("torch.")
    return [ParameterSpec(name=row.name, shape=row.shape, dtype=name_of_dtype) for row in table(shape)]


def padded_vocab(shape: ModelShape, tensor_ranks: int) -> int:
    return -(-shape.vocab_size // tensor_ranks) * tensor_ranks


# -- slicing ------------------------------------------------------------------------------------------------------------


def slice_for(full: Tensor, split: Split, rank: int, ranks: int) -> Tensor:
    """The slice of a full parameter on tensor rank `rank` of `ranks`."""
    views = _views_for(full, split, rank, ranks)
    if split is Split.VOCABULARY and (missing := -(-len(full) // ranks) - sum(map(len, views))):
        views.append(full.new_zeros(missing, *full.shape[1:]))
    return views[0] if len(views) == 1 else torch.cat(views)


def copies_for(place: Tensor, full: Tensor, split: Split, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copies, each a place and its source, that fill `place` with the slice of a rank, without memory where the full
    parameter is. Rows that pad a vocabulary become 0.
    """
    views, first = _views_for(full, split, rank, ranks), 0
    if len(views) == 1 and len(views[0]) == len(place):
        yield place, views[0]
        return
    for view in views:
        yield place[first : first + len(view)], view
        first += len(view)
    place[first:].zero_()


def _views_for(full: Tensor, split: Split, rank: int, ranks: int) -> list[Tensor]:
    """Views of a full parameter that are the rank's slice one below the other, without the rows that pad a vocabulary."""
    if split is Split.WHOLE or ranks == 1:
        return [full]
    if split is Split.COLUMNS:
        return [full.chunk(ranks, dim=1)[rank]]
    if split is Split.GATED:
        return [half.chunk(ranks)[rank] for half in full.chunk(2)]
    rows = -(-len(full) // ranks)
    return [full[rank * rows : (rank + 1) * rows]]


def join(slices: list[Tensor], split: Split, shape: tuple[int, ...]) -> Tensor:
    """The full parameter from the slices of all tensor ranks."""
    if split is Split.WHOLE:
        return slices[0]
    if split is Split.COLUMNS:
        return torch.cat(slices, dim=1)
    if split is Split.GATED:
        halves = [part.chunk(2) for part in slices]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(slices)[: shape[0]]


# -- a live model -------------------------------------------------------------------------------------------------------


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name. With tied embeddings, the last stage's copy of the embedding is OUTPUT.

    `model` may be a ModuleList of the chunks of an interleaved pipeline.
    """
    pieces = model if isinstance(model, nn.ModuleList) else [model]
    return {name: parameter for piece in pieces for name, parameter in _named(bare(piece))}


def bare(model: nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers."""
    while not hasattr(model, "decoder"):
        model = model.module  # pyright: ignore[reportAssignmentType]
    return model


def _named(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    layers = [*model.decoder.layers]
    first_layer = int(layers[0].layer_number) - 1 if layers else 0
    first_experts = [int(layer.mlp.local_expert_indices[0]) for layer in layers if hasattr(layer.mlp, "local_expert_indices")]
    first_expert = first_experts[0] if first_experts else 0
    for name, parameter in model.named_parameters():
        yield _canonical(name, first_layer, first_expert), parameter


def _canonical(name: str, first_layer: int, first_expert: int) -> str:
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if found is None:
        return name
    rest = FUSED_NORMS.get(found[2], _PARAMETRIZED.sub(_without_parametrization, found[2]))
    if expert := _SEQUENTIAL_EXPERT.fullmatch(rest) or _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{int(expert['number']) + first_expert}.{expert['matrix']}"
    return f"decoder.layers.{int(found[1]) + first_layer}.{rest}"


def _without_parametrization(found: re.Match[str]) -> str:
    return ".weight" if found["own"] == "original" else "."


_PARAMETRIZED = re.compile(r"\.parametrizations\.weight\.(?P<own>original$|0\.)")
"""An adapted matrix (lora.py), or the prefix of its adapters."""
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<matrix>.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(?P<matrix>linear_fc\d\.weight)(?P<number>\d+)")
"""Transformer Engine numbers the matrices of all experts within one grouped layer."""


def _targets(model: nn.Module, shape: ModelShape) -> Iterator[tuple[Parameter, nn.Parameter]]:
    """Table entries with their parameter on this rank, without adapters; a tied embedding can have two."""
    local = {name: own for name, own in local_parameters(model).items() if not is_adapter(name)}
    for row in table(shape):
        if (own := local.pop(row.name, None)) is not None:
            yield row, own
        if row.name == EMBEDDING and shape.tied_embeddings and (copy := local.pop(OUTPUT, None)) is not None:
            yield row, copy
    if local:
        raise ValueError(f"the model has parameters that are not in its table: {', '.join(sorted(local))}")


def initialize_parameters(model: nn.Module, shape: ModelShape, *, seed: int | None) -> None:
    """Fill in initial weights, independent of the layout: each name has its own generator. `seed` None: zeros."""
    rank, ranks = tensor_rank()
    with torch.no_grad():
        for row, own in _targets(model, shape):
            if seed is None:
                own.zero_()
                continue
            own.copy_(slice_for(initial_value(row, seed), row.split, rank, ranks))


def initial_value(row: Parameter, seed: int) -> Tensor:
    if row.initial == "ones":
        return torch.ones(row.shape)
    if row.initial == "zeros":
        return torch.zeros(row.shape)
    # torch's CPU generator uses only 32 bits of a seed, so seed and name are hashed into those.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {row.name}".encode()))
    return torch.randn(row.shape, generator=generator) * row.initial


def load_full(model: nn.Module, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Copy full parameters into the model in place, each rank its part."""
    FullParameterLoader(model, shape).load(tensors)


class RankParts(dict[str, Tensor]):
    """This rank's parts of full parameters, by name."""


class FullParameterLoader:
    """Loads one model again and again: where each parameter goes is found once, because models of experts have thousands."""

    def __init__(self, model: nn.Module, shape: ModelShape) -> None:
        self._shape, self._targets = shape, list(_targets(model, shape))
        self._staged = RankParts()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full parameters, or this rank's parts that were staged, into the model in place."""
        is_staged = isinstance(tensors, RankParts)
        if not is_staged:
            check_complete(self._shape, tensors)
        rank, ranks = tensor_rank()
        with torch.no_grad():
            copies = (
                copies_for(own, tensors[row.name], Split.WHOLE if is_staged else row.split, rank, ranks)
                for row, own in self._targets
            )
            copy_all(chain.from_iterable(copies))  # nothing keeps a parameter that was assembled and copied

    def stage(self, tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
        """Copy this rank's parts from host memory to its GPU, for `load`; blocks. On a CPU they are where they are needed.

        The GPU memory is that of the parts staged before.
        """
        if device.type == "cpu":
            return tensors
        check_complete(self._shape, tensors)
        rank, ranks = tensor_rank()
        with transport_stream(device):
            for row, own in self._targets:
                full = tensors[row.name]
                if row.name not in self._staged:
                    self._staged[row.name] = torch.empty(own.shape, dtype=full.dtype, device=device)
                for place, view in copies_for(self._staged[row.name], full, row.split, rank, ranks):
                    place.copy_(view, non_blocking=True)  # leaving the stream's context waits for all
        return self._staged


def check_complete(shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` are exactly this model's parameters."""
    found = tensors.sizes if isinstance(tensors, StoredWeights) else {name: each.shape for name, each in tensors.items()}
    if found != (wanted := _sizes(shape)):
        difference = difference_of(wanted, {name: tuple(size) for name, size in found.items()})
        raise ValueError(f"these parameters do not fit the model: {difference}")


@lru_cache(maxsize=4)  # an engine asks at every swap, while it decodes nothing
def _sizes(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    return {row.name: row.shape for row in table(shape)}


def difference_of(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """How many parameters differ in shape, and which is the first; "" if none."""
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if not wrong:
        return ""
    expected, shape = (sizes.get(wrong[0], "none") for sizes in (wanted, found))
    return f"{len(wrong)} parameters differ, the first is {wrong[0]}: expected {expected}, found {shape}"


def held_boxes(model: nn.Module, shape: ModelShape, merged: Mapping[str, Tensor] | None = None) -> dict[Box, Tensor]:
    """This rank's parts of the full parameters, without copying; a part with two copies appears once.

    `merged`, by name: what to hand out instead of a parameter. From the first call on a model must keep its parameters; these
    may move.
    """
    if (known := _HELD.get(model)) is None or known[0] != shape:
        rank, ranks = tensor_rank()
        known = _HELD[model] = shape, [(own, [*_places(row, own.shape, rank, ranks)]) for row, own in _targets(model, shape)]
    instead = merged if merged is not None else {}
    held: dict[Box, Tensor] = {}
    for own, places in known[1]:
        for box, rows in places:
            held[box] = _part(instead.get(box.name, own).detach(), rows)
    return held


_HELD = WeakKeyDictionary[nn.Module, tuple[ModelShape, list[tuple[nn.Parameter, list[tuple[Box, slice | None]]]]]]()
"""Where a model's parameters belong: to find that out for thousands takes longer than to pack them."""


def boxes_of(row: Parameter, own: Tensor, rank: int, ranks: int) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a full parameter that tensor rank `rank` of `ranks` holds."""
    return ((box, _part(own, rows)) for box, rows in _places(row, own.shape, rank, ranks))


def _part(own: Tensor, rows: slice | None) -> Tensor:
    return own if rows is None else own[rows]


def _places(row: Parameter, own: Sequence[int], rank: int, ranks: int) -> Iterator[tuple[Box, slice | None]]:
    """The same boxes, with the rows of a rank's parameter of shape `own` that each is; None: all."""
    whole = Box(name=row.name, start=(0,) * len(row.shape), shape=row.shape)
    if row.split is Split.WHOLE or ranks == 1:
        yield whole, None
    elif row.split is Split.COLUMNS:
        yield replace(whole, start=(0, rank * own[1]), shape=(row.shape[0], own[1])), None
    elif row.split is Split.GATED:
        half = own[0] // 2
        for number in range(2):
            first = number * row.shape[0] // 2 + rank * half
            yield whole.cut(first, first + half), slice(number * half, (number + 1) * half)
    else:
        first = rank * own[0]
        last = min(first + own[0], row.shape[0])  # the rest is vocabulary padding
        if first < last:
            yield whole.cut(first, last), slice(0, last - first)


def tensor_rank() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
