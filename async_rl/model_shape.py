"""The measurements of a transformer, from a `model:` section. No torch: every process may ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from async_rl.config import ExpertsSize, ModelConfig, ModelSize
from async_rl.errors import ConfigError, about

Head = Literal["tokens", "scalar", "both"]
"""What the last layer gives for every token: logits, one number, or both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Of the layers that have several MLPs, of which every token visits a few."""

    number: int
    per_token: int
    ffn: int
    layers: tuple[int, ...]
    """Which layers have them. The others have one MLP of `ModelShape.ffn`."""
    weights_sum_to_one: bool = True
    """Else a token's few experts count as much as they would among all of them."""


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
    rope_factor: float | None = None
    """Long waves are this much longer, in the way of Llama 3."""
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    tied_embeddings: bool = True
    init_std: float = 0.02
    head: Head = "tokens"


def model_shape(config: ModelConfig, vocab_size: int) -> ModelShape:
    """`vocab_size` is the tokenizer's; a folder's own is at least as large and wins. Raises ConfigError."""
    if config.folder is not None:
        from async_rl.model_folder import read_shape

        with about("model.folder"):
            found = read_shape(config.folder)
        if found.vocab_size < vocab_size:
            raise ConfigError(
                f"model.folder: the model in {config.folder} knows {found.vocab_size} tokens and the tokenizer {vocab_size}; "
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
        qk_norm=size.experts is not None,  # the only family with experts has it
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
