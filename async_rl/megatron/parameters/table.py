"""The parameter table of a model: canonical name, full shape, and how tensor ranks split it. No torch.

A canonical name is Megatron's name with global numbers of layer and expert; shapes are without vocabulary padding and tensor
slicing. Initial weights, loading, weight pushes, checkpoints and Hugging Face folders all use this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from async_rl.models.shape import ModelShape


class Split(Enum):
    """How tensor-parallel ranks divide a parameter."""

    WHOLE = "replicated"
    ROWS = "dimension 0; query-key-value rows are ordered by group, so that equal parts are whole groups"
    GATED = "dimension 0 of each half: the gate's rows, then the up projection's"
    COLUMNS = "dimension 1"
    VOCABULARY = "dimension 0, padded with zero rows until ranks get equal parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An entry of the table."""

    name: str
    shape: tuple[int, ...]
    split: Split
    initial: float | Literal["ones", "zeros"]
    """Initial value; a number is the standard deviation of a normal distribution."""
    layer: int | None = None
    expert: int | None = None
    """Expert number; an expert is never split."""


def table(shape: ModelShape) -> list[Parameter]:
    """Every parameter of the model, in the order in which data flows through it."""
    hidden, std = shape.hidden, shape.init_std
    vocabulary = (shape.vocab_size, hidden)
    rows = [Parameter(name=EMBEDDING, shape=vocabulary, split=Split.VOCABULARY, initial=std)]
    for layer in range(shape.layers):
        rows += _layer(shape, layer)
    rows.append(Parameter(name="decoder.final_layernorm.weight", shape=(hidden,), split=Split.WHOLE, initial=_norm(shape)))
    if not shape.tied_embeddings and shape.head != "scalar":
        rows.append(Parameter(name=OUTPUT, shape=vocabulary, split=Split.VOCABULARY, initial=std))
    if shape.head != "tokens":
        # Values start near 0, so that the first values of a critic or reward model are not noise.
        rows.append(Parameter(name=VALUE_WEIGHT, shape=(1, hidden), split=Split.WHOLE, initial=1 / (hidden + 1)))
        rows.append(Parameter(name=VALUE_BIAS, shape=(1,), split=Split.WHOLE, initial="zeros"))
    return rows


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VALUE_WEIGHT = "value_head.weight"
VALUE_BIAS = "value_head.bias"
VALUE_HEAD = (VALUE_WEIGHT, VALUE_BIAS)
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's names of the norms that it fuses into the following linear layers, with ours."""


def _norm(shape: ModelShape) -> Literal["ones", "zeros"]:
    return "zeros" if shape.centered_norms else "ones"


def _layer(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    hidden, head = shape.hidden, shape.head_dim
    queries, qkv = shape.heads * head, (shape.heads + 2 * shape.kv_heads) * head
    # The two matrices that write into the residual stream start smaller, so that its variance does not grow with depth.
    residual_std = shape.init_std / math.sqrt(2 * shape.layers)

    def row(
        name: str, sizes: tuple[int, ...], split: Split, initial: float | Literal["ones", "zeros"], expert: int | None = None
    ) -> Parameter:
        return Parameter(
            name=f"decoder.layers.{layer}.{name}", shape=sizes, split=split, initial=initial, layer=layer, expert=expert
        )

    norm = _norm(shape)
    if shape.norms != "after":
        yield row("input_layernorm.weight", (hidden,), Split.WHOLE, norm)
    yield row("self_attention.linear_qkv.weight", (qkv, hidden), Split.ROWS, shape.init_std)
    if shape.qkv_bias:
        yield row("self_attention.linear_qkv.bias", (qkv,), Split.ROWS, "zeros")
    if shape.qk_norm and shape.qk_norm_over == "head":
        yield row("self_attention.q_layernorm.weight", (head,), Split.WHOLE, norm)
        yield row("self_attention.k_layernorm.weight", (head,), Split.WHOLE, norm)
    elif shape.qk_norm:
        yield row("self_attention.q_layernorm.weight", (queries,), Split.ROWS, norm)
        yield row("self_attention.k_layernorm.weight", (shape.kv_heads * head,), Split.ROWS, norm)
    yield row("self_attention.linear_proj.weight", (hidden, queries), Split.COLUMNS, residual_std)
    if shape.norms != "before":
        yield row("self_attention.linear_proj.post_layernorm.weight", (hidden,), Split.WHOLE, norm)
    if shape.norms != "after":
        yield row("pre_mlp_layernorm.weight", (hidden,), Split.WHOLE, norm)
    if shape.experts is None or layer not in shape.experts.layers:
        yield row("mlp.linear_fc1.weight", (2 * shape.ffn, hidden), Split.GATED, shape.init_std)
        yield row("mlp.linear_fc2.weight", (hidden, shape.ffn), Split.COLUMNS, residual_std)
        if shape.norms != "before":
            yield row("mlp.linear_fc2.post_layernorm.weight", (hidden,), Split.WHOLE, norm)
        return
    yield row("mlp.router.weight", (shape.experts.number, hidden), Split.WHOLE, shape.init_std)
    for expert in range(shape.experts.number):
        own, ffn = f"mlp.experts.{expert}", shape.experts.ffn
        yield row(f"{own}.linear_fc1.weight", (2 * ffn, hidden), Split.WHOLE, shape.init_std, expert)
        yield row(f"{own}.linear_fc2.weight", (hidden, ffn), Split.WHOLE, residual_std, expert)
    if (shared := shape.experts.shared_ffn) is not None:
        yield row("mlp.shared_experts.gate_weight", (1, hidden), Split.WHOLE, shape.init_std)
        yield row("mlp.shared_experts.linear_fc1.weight", (2 * shared, hidden), Split.GATED, shape.init_std)
        yield row("mlp.shared_experts.linear_fc2.weight", (hidden, shared), Split.COLUMNS, residual_std)
