"""What Hugging Face calls our parameters: one table for all families, read in both directions. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from async_rl.megatron.parameters.table import EMBEDDING, OUTPUT, VALUE_BIAS, VALUE_WEIGHT, table
from async_rl.models.shape import ModelShape


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


_MLP = (
    Name(ours="linear_fc1.weight", theirs=("gate_proj.weight", "up_proj.weight"), merge=Merge.STACKED),
    Name(ours="linear_fc2.weight", theirs=("down_proj.weight",)),
)
"""Of a layer, or of one of its experts."""
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
    Name(ours="mlp.router.weight", theirs=("mlp.gate.weight",)),
)
_MODEL = (
    Name(ours=EMBEDDING, theirs=("model.embed_tokens.weight",)),
    Name(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",)),
    Name(ours=OUTPUT, theirs=("lm_head.weight",)),
)


def names(shape: ModelShape) -> Iterator[Name]:
    """Of every parameter, in the table's order. The heads of critics and reward models have none: they are ours alone."""
    known = {name.ours: name for name in _MODEL}
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        known |= _prefixed(_LAYER, ours, theirs) | _prefixed(_MLP, f"{ours}mlp.", f"{theirs}mlp.")
        for expert in range(shape.experts.number if shape.experts is not None else 0):
            known |= _prefixed(_MLP, f"{ours}mlp.experts.{expert}.", f"{theirs}mlp.experts.{expert}.")
    return (known[row.name] for row in table(shape) if row.name not in (VALUE_WEIGHT, VALUE_BIAS))


def _prefixed(names: tuple[Name, ...], ours: str, theirs: str) -> dict[str, Name]:
    return {
        ours + name.ours: Name(ours=ours + name.ours, theirs=tuple(theirs + part for part in name.theirs), merge=name.merge)
        for name in names
    }
