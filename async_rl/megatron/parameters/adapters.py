"""Low-rank adapters as rows of the parameter table. No torch.

Each adapted matrix of Hugging Face's has an adapter of its own, also where Megatron fuses several into one. Tensor ranks divide
B where they divide the rows of the matrix, and A where they divide its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from async_rl.config.learner import LoraConfig, LoraTarget
from async_rl.errors import ConfigError
from async_rl.megatron.parameters.table import VALUE_HEAD, Parameter, Split, table
from async_rl.models.shape import ModelShape

_PARTS: dict[str, tuple[tuple[LoraTarget, ...], str]] = {
    "self_attention.linear_qkv": (("q_proj", "k_proj", "v_proj"), "self_attn"),
    "self_attention.linear_proj": (("o_proj",), "self_attn"),
    "mlp.linear_fc1": (("gate_proj", "up_proj"), "mlp"),
    "mlp.linear_fc2": (("down_proj",), "mlp"),
}
"""The matrices of a layer that can be adapted, with Hugging Face's names of their parts and of the module that has them."""
_OF_MLPS = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRows:
    target: LoraTarget
    theirs: str
    """Hugging Face's name of the module, as in model.layers.0.self_attn.q_proj."""
    matrix: str
    """Name of the parameter whose rows, or a part of them, are adapted."""
    a: Parameter
    b: Parameter


def adapters(shape: ModelShape, lora: LoraConfig) -> Iterator[AdapterRows]:
    """Yield the adapters of a model in the table's order."""
    for row in table(shape):
        layer, matrix = row.name.removeprefix(f"decoder.layers.{row.layer}."), row.name.removesuffix(".weight")
        parts, module = _PARTS.get(layer.removesuffix(".weight"), ((), ""))
        for target in parts:
            if target in lora.targets:
                yield _adapter(shape, lora, row, matrix, target, f"model.layers.{row.layer}.{module}.{target}")


def _adapter(shape: ModelShape, lora: LoraConfig, row: Parameter, matrix: str, target: LoraTarget, theirs: str) -> AdapterRows:
    rows, columns = _rows(shape, target), row.shape[1]
    divides_columns = row.split is Split.COLUMNS
    a = Parameter(
        name=f"{matrix}.{target}.lora_A",
        shape=(lora.rank, columns),
        split=Split.COLUMNS if divides_columns else Split.WHOLE,
        initial=1 / math.sqrt(3 * columns),  # the variance that PEFT's uniform distribution has
        layer=row.layer,
    )
    b = Parameter(
        name=f"{matrix}.{target}.lora_B",
        shape=(rows, lora.rank),
        split=Split.WHOLE if divides_columns else Split.ROWS,
        initial="zeros",
        layer=row.layer,
    )
    return AdapterRows(target=target, theirs=theirs, matrix=row.name, a=a, b=b)


def _rows(shape: ModelShape, target: LoraTarget) -> int:
    match target:
        case "q_proj":
            return shape.heads * shape.head_dim
        case "k_proj" | "v_proj":
            return shape.kv_heads * shape.head_dim
        case "gate_proj" | "up_proj":
            return shape.ffn
        case "o_proj" | "down_proj":
            return shape.hidden


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of an adapter's parameter."""
    return name.endswith((".lora_A", ".lora_B"))


def trained_rows(shape: ModelShape, lora: LoraConfig | None) -> list[Parameter]:
    """The rows that are trained and that checkpoints contain: all; with adapters those, and a value head."""
    if lora is None:
        return table(shape)
    rows = [row for adapter in adapters(shape, lora) for row in (adapter.a, adapter.b)]
    return rows + [row for row in table(shape) if row.name in VALUE_HEAD]


def default_lora(shape: ModelShape) -> LoraConfig:
    """The adapters of all matrices that can have some."""
    lora = LoraConfig()
    if shape.experts is None:
        return lora
    return LoraConfig(targets=tuple(target for target in lora.targets if target not in _OF_MLPS))


def check_lora(lora: LoraConfig | None, shape: ModelShape, layer_spec: str) -> None:
    """Raise ConfigError if this model cannot have these adapters. Builds no model."""
    if lora is None:
        return
    if layer_spec == "transformer_engine":
        raise ConfigError(
            "learner.lora: adapters need Megatron's own layers; set model.layer_spec to local, or remove learner.lora"
        )
    if shape.experts is not None and _OF_MLPS & {*lora.targets}:
        raise ConfigError(
            "learner.lora.targets: routed experts have no adapters; name the matrices of the attention alone: "
            "[q_proj, k_proj, v_proj, o_proj]"
        )
