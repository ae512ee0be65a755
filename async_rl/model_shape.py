"""The measurements of a transformer, from a `model:` section. No torch: every process may ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import ModelConfig, ModelSize
from async_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = True
    init_std: float = 0.02


def model_shape(config: ModelConfig, vocab_size: int) -> ModelShape:
    """`vocab_size` is the tokenizer's; a folder's own is at least as large and wins."""
    if config.folder is not None:
        return _from_folder(config.folder)
    assert config.size is not None
    return _from_size(config.size, vocab_size)


def _from_size(size: ModelSize, vocab_size: int) -> ModelShape:
    return ModelShape(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads if size.kv_heads is not None else size.heads,
        head_dim=size.hidden // size.heads,
        ffn=size.ffn if size.ffn is not None else 4 * size.hidden,
        vocab_size=vocab_size,
        max_positions=size.max_positions,
        rope_theta=size.rope_theta,
        tied_embeddings=size.tied_embeddings,
        init_std=size.init_std,
    )


_FAMILIES = {"llama", "qwen2", "qwen3"}


def _from_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"model.folder: cannot read {path}: {error.strerror}") from error
    family = found.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(f"model.folder: {path} has model_type {family!r}; supported are {', '.join(sorted(_FAMILIES))}")
    rope: dict[str, Any] = found.get("rope_parameters") or {}
    scaling: dict[str, Any] = found.get("rope_scaling") or {}
    kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    if kind != "default":
        raise ConfigError(f"model.folder: {path} asks for rope_type {kind!r}; only 'default' is supported")
    if found.get("use_sliding_window") or (family == "llama" and found.get("sliding_window")):
        raise ConfigError(f"model.folder: {path} asks for a sliding window, which is not supported")
    if found.get("mlp_bias") or (family == "llama" and found.get("attention_bias")):
        raise ConfigError(f"model.folder: {path} asks for biases in MLP or Llama attention, which are not supported")
    heads = found["num_attention_heads"]
    return ModelShape(
        hidden=found["hidden_size"],
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads", heads),
        head_dim=found.get("head_dim") or found["hidden_size"] // heads,
        ffn=found["intermediate_size"],
        vocab_size=found["vocab_size"],
        max_positions=found["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta", found.get("rope_theta", 10_000.0))),
        norm_eps=found["rms_norm_eps"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=found.get("tie_word_embeddings", False),
    )
