"""The sizes of a transformer. No torch: every process may ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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

    def with_head(self, head: Head) -> ModelShape:
        """The same model with another last layer. A head that gives no logits has no row per word, so nothing to tie."""
        return self if head == "tokens" else replace(self, head=head, tied_embeddings=False)
