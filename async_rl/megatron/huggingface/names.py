"""Maps canonical names to Hugging Face's tensor names, for all families. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from async_rl.megatron.parameters.table import EMBEDDING, OUTPUT, VALUE_BIAS, VALUE_WEIGHT, table
from async_rl.models.shape import ModelShape


class Merge(Enum):
    """How Hugging Face's tensors form one of our parameters."""

    SAME = "one tensor, unchanged"
    QUERY_KEY_VALUE = "rows ordered by group: queries, key, value"
    STACKED = "concatenated along dimension 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName:
    ours: str
    theirs: tuple[str, ...]
    merge: Merge = Merge.SAME


_MLP = (
    TensorName(ours="linear_fc1.weight", theirs=("gate_proj.weight", "up_proj.weight"), merge=Merge.STACKED),
    TensorName(ours="linear_fc2.weight", theirs=("down_proj.weight",)),
)
"""The MLP of a layer, or of one expert."""
_LAYER = (
    TensorName(ours="input_layernorm.weight", theirs=("input_layernorm.weight",)),
    *(
        TensorName(
            ours=f"self_attention.linear_qkv.{kind}",
            theirs=tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"),
            merge=Merge.QUERY_KEY_VALUE,
        )
        for kind in ("weight", "bias")
    ),
    TensorName(ours="self_attention.q_layernorm.weight", theirs=("self_attn.q_norm.weight",)),
    TensorName(ours="self_attention.k_layernorm.weight", theirs=("self_attn.k_norm.weight",)),
    TensorName(ours="self_attention.linear_proj.weight", theirs=("self_attn.o_proj.weight",)),
    TensorName(ours="mlp.router.weight", theirs=("mlp.gate.weight",)),
    TensorName(ours="mlp.shared_experts.gate_weight", theirs=("mlp.shared_expert_gate.weight",)),
)
_INPUT_NORM = TensorName(ours="pre_mlp_layernorm.weight", theirs=("post_attention_layernorm.weight",))
_OUTPUT_NORMS = (
    TensorName(ours="self_attention.linear_proj.post_layernorm.weight", theirs=("post_attention_layernorm.weight",)),
    TensorName(ours="pre_mlp_layernorm.weight", theirs=("pre_feedforward_layernorm.weight",)),
    TensorName(ours="mlp.linear_fc2.post_layernorm.weight", theirs=("post_feedforward_layernorm.weight",)),
)
"""Hugging Face's `post_attention_layernorm` is the MLP's norm, unless the outputs have norms."""
_MODEL = (
    TensorName(ours=EMBEDDING, theirs=("model.embed_tokens.weight",)),
    TensorName(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",)),
    TensorName(ours=OUTPUT, theirs=("lm_head.weight",)),
)


def names(shape: ModelShape) -> Iterator[TensorName]:
    """Names of all parameters in the table's order, without value heads, which Hugging Face does not have."""
    known = {name.ours: name for name in _MODEL}
    of_layer = (*_LAYER, *((_INPUT_NORM,) if shape.norms == "before" else _OUTPUT_NORMS))
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        known |= _prefixed(of_layer, ours, theirs) | _prefixed(_MLP, f"{ours}mlp.", f"{theirs}mlp.")
        known |= _prefixed(_MLP, f"{ours}mlp.shared_experts.", f"{theirs}mlp.shared_expert.")
        for expert in range(shape.experts.number if shape.experts is not None else 0):
            known |= _prefixed(_MLP, f"{ours}mlp.experts.{expert}.", f"{theirs}mlp.experts.{expert}.")
    return (known[row.name] for row in table(shape) if row.name not in (VALUE_WEIGHT, VALUE_BIAS))


def _prefixed(names: tuple[TensorName, ...], ours: str, theirs: str) -> dict[str, TensorName]:
    return {
        ours + name.ours: TensorName(
            ours=ours + name.ours, theirs=tuple(theirs + part for part in name.theirs), merge=name.merge
        )
        for name in names
    }
