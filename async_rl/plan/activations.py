"""Activations of a training step on one rank: what layers keep for the backward pass, and the logits with their gradient.

Counted from what Megatron's local layers and async_rl.megatron save. In elements per token, of one layer, before `tensor`:

    norm, linear_qkv      hidden + hidden                  inputs of both
    attention             queries + 2 keys                 output of linear_qkv, which the values are a view of
                          queries [+ queries]              rotated; [before the query's norm]
                          keys + queries                   rotated; output, which is the input of linear_proj
                          4 head_dim                       cosine and sine, of queries and of keys
    norm, linear_fc1      hidden + hidden                  inputs of both
    MLP                   2 ffn + ffn + ffn + ffn          output of linear_fc1, silu(gate), up, their product
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config.learner import UpdatesConfig
from async_rl.models.shape import ModelShape

FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes at the peak of a rank's forward and backward passes."""

    layers: float
    logits: float


def activations(
    shape: ModelShape, learner: UpdatesConfig, *, tokens: int, element: int, stage: int, updates: bool
) -> Activations:
    """Return the peak for rows of `tokens` tokens, in layers that compute with `element` bytes per number."""
    parallel = learner.parallel
    own = -(-tokens // parallel.context)
    layers = shape.layers // parallel.pipeline
    kept, mlp = _layer(shape, learner, element)
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    each = {"none": kept, "selective": kept - mlp, "full": element * hidden}[learner.recompute]
    in_flight = parallel.pipeline - stage
    held = own * each * layers * in_flight + own * kept
    is_last = stage == parallel.pipeline - 1
    logits = 0.0
    if is_last and shape.head != "scalar":
        logits = tokens * -(-shape.vocab_size // parallel.tensor) * (3 * FLOAT + (element if element < FLOAT else 0))
    return Activations(layers=held if updates else own * kept, logits=logits)


def _layer(shape: ModelShape, learner: UpdatesConfig, element: int) -> tuple[float, float]:
    """Return the bytes per token that a layer keeps, and those of them that belong to its MLP."""
    parallel = learner.parallel
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    queries, keys = (heads * shape.head_dim / parallel.tensor for heads in (shape.heads, shape.kv_heads))
    attention = 3 * queries + 3 * keys + (queries if shape.qk_norm else 0) + 4 * shape.head_dim
    mlp = 5 * shape.ffn / parallel.tensor
    return element * (4 * hidden + attention + mlp), element * mlp
