"""The dimensions of a transformer. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from async_rl.models.rope import RopeScaling

Norms = Literal["before", "after", "around"]
"""Where attention and MLP are normed: their inputs, their outputs, or both."""

Head = Literal["tokens", "scalar", "both"]
"""Output of the last layer per token: logits (`tokens`), one number (`scalar`), or both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts layers of a model."""

    number: int
    """Experts per layer."""
    per_token: int
    ffn: int
    """MLP width of one expert."""
    layers: tuple[int, ...]
    """Indexes of the layers with experts; the others have a dense MLP of `ModelShape.ffn`."""
    shared_ffn: int | None = None
    """MLP width of the expert that every token uses, which has a gate; None: there is no such expert."""
    weights_sum_to_one: bool = True
    """Normalise the router's weights over the chosen experts; else over all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Sliding-window attention of some layers."""

    tokens: int
    """The last tokens that a token attends to, itself included."""
    layers: tuple[int, ...]
    """Indexes of the layers with the window; the others attend to all tokens before."""
    rope_theta: float | None = None
    """Base of these layers' rotary embedding, which is not scaled; None: as in the other layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    family: str | None = None
    """Hugging Face's `model_type`; None: the first family with these features."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    """Norm the queries (keys) of a token head by head, or all heads together."""
    norms: Norms = "before"
    centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden)."""
    query_scalar: int | None = None
    """Attention scores are divided by its square root; None: by that of head_dim."""
    window: Window | None = None
    experts: Experts | None = None
    tied_embeddings: bool = True
    init_std: float = 0.02
    head: Head = "tokens"
    max_sequence: int | None = None
    """Tokens of the longest sequence that a run samples and trains; None: as many as there are positions."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_sequence if self.max_sequence is not None else self.max_positions

    @property
    def shared_ffn(self) -> int:
        """Width of the expert that every token goes through; 0: there is none."""
        return self.experts.shared_ffn if self.experts is not None and self.experts.shared_ffn is not None else 0

    def with_head(self, head: Head) -> ModelShape:
        """The same model with another head. Embeddings are tied only with head `tokens`."""
        return self if head == "tokens" else replace(self, head=head, tied_embeddings=False)
