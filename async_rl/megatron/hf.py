"""Hugging Face folders of Llama, Qwen2 and Qwen3: one table of names, read in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.megatron.parameters import EMBEDDING, OUTPUT, check_complete, table
from async_rl.model_shape import ModelShape


class Merge(Enum):
    """How the tensors of a folder become one of ours."""

    SAME = "one tensor, as it is"
    QUERY_KEY_VALUE = "rows of one group after another: its queries, its key, its value"
    STACKED = "one above the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    ours: str
    theirs: tuple[str, ...]
    merge: Merge = Merge.SAME


_MODEL = (
    Name(ours=EMBEDDING, theirs=("model.embed_tokens.weight",)),
    Name(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",)),
    Name(ours=OUTPUT, theirs=("lm_head.weight",)),
)
_LAYER = (
    Name(ours="input_layernorm.weight", theirs=("input_layernorm.weight",)),
    *(
        Name(
            ours=f"self_attention.linear_qkv.{kind}",
            theirs=tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"),
            merge=Merge.QUERY_KEY_VALUE,
        )
        for kind in ("weight", "bias")
    ),
    Name(ours="self_attention.q_layernorm.weight", theirs=("self_attn.q_norm.weight",)),
    Name(ours="self_attention.k_layernorm.weight", theirs=("self_attn.k_norm.weight",)),
    Name(ours="self_attention.linear_proj.weight", theirs=("self_attn.o_proj.weight",)),
    Name(ours="pre_mlp_layernorm.weight", theirs=("post_attention_layernorm.weight",)),
    Name(ours="mlp.linear_fc1.weight", theirs=("mlp.gate_proj.weight", "mlp.up_proj.weight"), merge=Merge.STACKED),
    Name(ours="mlp.linear_fc2.weight", theirs=("mlp.down_proj.weight",)),
)


def names(shape: ModelShape) -> Iterator[Name]:
    """The rows that a model of this shape has: which biases and norms exist depends on the family."""
    every = list(_MODEL)
    for layer in range(shape.layers):
        every += (
            Name(
                ours=f"decoder.layers.{layer}.{name.ours}",
                theirs=tuple(f"model.layers.{layer}.{part}" for part in name.theirs),
                merge=name.merge,
            )
            for name in _LAYER
        )
    exists = {row.name for row in table(shape)}
    return (name for name in every if name.ours in exists)


def to_canonical(theirs: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    return {name.ours: _merge([theirs[part] for part in name.theirs], name.merge, shape) for name in names(shape)}


def from_canonical(ours: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    return {
        part: tensor
        for name in names(shape)
        for part, tensor in zip(name.theirs, _divide(ours[name.ours], name.merge, shape), strict=True)
    }


def load_folder(folder: Path, shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Full parameters under canonical names. Raises ConfigError naming what is missing or does not fit."""
    theirs = {name: tensor.to(dtype) for name, tensor in _read(folder, shape).items()}
    canonical = to_canonical(theirs, shape)
    try:
        check_complete(shape, canonical)
    except ValueError as error:
        raise ConfigError(f"model.folder: the weights in {folder} contradict its config.json: {error}") from error
    return canonical


def _read(folder: Path, shape: ModelShape) -> dict[str, Tensor]:
    missing = {part for name in names(shape) for part in name.theirs}
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                present = missing & set(opened.keys())
                found |= {name: opened.get_tensor(name) for name in present}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.folder: cannot read {path}: {error}") from error
        missing -= present
    if missing:
        raise ConfigError(f"model.folder: {folder} lacks {len(missing)} tensors, the first is {min(missing)}")
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})


def _merge(parts: list[Tensor], merge: Merge, shape: ModelShape) -> Tensor:
    if merge is Merge.SAME:
        return parts[0]
    if merge is Merge.STACKED:
        return torch.cat(parts)
    by_group = [part.view(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _divide(whole: Tensor, merge: Merge, shape: ModelShape) -> list[Tensor]:
    if merge is Merge.SAME:
        return [whole]
    if merge is Merge.STACKED:
        return list(whole.chunk(2))
    by_group = whole.view(shape.kv_heads, -1, *whole.shape[1:])
    queries = shape.heads // shape.kv_heads * shape.head_dim
    return [part.flatten(0, 1) for part in by_group.split([queries, shape.head_dim, shape.head_dim], dim=1)]
