"""The shape of the model that a `model` section describes."""

from __future__ import annotations

from dataclasses import replace

from async_rl.config import ExpertsSize, ModelConfig, ModelSize
from async_rl.errors import ConfigError, naming_setting
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import Experts, ModelShape


def model_shape(config: ModelConfig, vocab_size: int) -> ModelShape:
    """Resolve the shape. `vocab_size` is the tokenizer's; that of a folder must be at least as large and is used. Raises
    ConfigError."""
    shape = _of_model(config, vocab_size)
    if config.max_sequence is not None and config.max_sequence > shape.max_positions:
        raise ConfigError(
            f"model.max_sequence ({config.max_sequence}) is above the model's {shape.max_positions} positions; lower it, or "
            "remove it to use them all"
        )
    return replace(shape, max_sequence=config.max_sequence)


def _of_model(config: ModelConfig, vocab_size: int) -> ModelShape:
    if config.folder is not None:
        with naming_setting("model.folder"):
            found = read_shape(config.folder)
        if found.vocab_size < vocab_size:
            raise ConfigError(
                f"model.folder: the model in {config.folder} has {found.vocab_size} tokens and the tokenizer {vocab_size}; "
                "use the tokenizer that belongs to it (tokenizer.folder)"
            )
        return found
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
        qk_norm=size.experts is not None,  # as in qwen3_moe, the only family with experts
        experts=_experts(size.experts, size.layers) if size.experts is not None else None,
        tied_embeddings=size.tied_embeddings,
        init_std=size.init_std,
    )


def _experts(size: ExpertsSize, layers: int) -> Experts:
    return Experts(
        number=size.number,
        per_token=size.per_token,
        ffn=size.ffn,
        layers=tuple(layer for layer in range(layers) if (layer + 1) % size.every == 0),
    )
