"""Scaling of the rotary position embedding to more positions: its settings in a config.json, read and written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

ScalingKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotations are slowed down. Fields that a kind does not use keep their defaults."""

    kind: ScalingKind
    factor: float
    """The number of positions grows by this."""
    original_positions: int = 0
    """llama3, yarn: positions that the model was pretrained with."""
    low_freq_factor: float = 1.0
    """llama3: rotations that turn less often than this in the original positions are slowed down by the factor ..."""
    high_freq_factor: float = 4.0
    """llama3: ... and those that turn more often than this are kept."""
    beta_slow: float = 1.0
    """yarn: as low_freq_factor."""
    beta_fast: float = 32.0
    """yarn: as high_freq_factor."""
    truncate: bool = True
    """yarn: round the first and the last dimension between the two to whole numbers."""
    attention_factor: float = 1.0
    """yarn: sine and cosine are multiplied by this."""


def rope_refusals(rope: Mapping[str, Any]) -> Iterator[str]:
    """Names of the settings of a config.json's rope that are not supported."""
    kind, kinds = rope["rope_type"], ("default", *get_args(ScalingKind))
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rope_parameters per kind of layer, which is not supported"
    elif kind not in kinds:
        yield f"rope_type {kind!r}, where only {', '.join(map(repr, kinds))} are supported"
    if rope["partial_rotary_factor"] != 1.0:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']}, where only 1 is supported"


def read_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    """Read a config.json's rope; None: it is not scaled. Missing settings get the defaults of transformers; raises KeyError,
    TypeError and ValueError.
    """
    original = rope.get("original_max_position_embeddings")
    original = int(original) if original is not None else max_positions
    match rope["rope_type"]:
        case "linear":
            return RopeScaling(kind="linear", factor=float(rope["factor"]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(rope["factor"]),
                original_positions=original,
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
            )
        case "yarn":
            factor = float(rope["factor"]) if rope["factor"] is not None else max_positions / original
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_positions=original,
                beta_slow=float(_given(rope, "beta_slow", 1.0)),
                beta_fast=float(_given(rope, "beta_fast", 32.0)),
                truncate=bool(_given(rope, "truncate", True)),
                attention_factor=_attention_factor(rope, factor),
            )
        case _:
            return None


def _given(rope: Mapping[str, Any], key: str, default: float) -> float:
    value = rope.get(key)
    return value if value is not None else default


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    of_all, of_some = rope.get("mscale_all_dim"), rope.get("mscale")
    if of_all and of_some:  # one without the other has no effect
        return _concentration(factor, of_some) / _concentration(factor, of_all)
    return _concentration(factor, 1.0)


def _concentration(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def written_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The settings of a config.json, without the base."""
    if scaling is None:
        return {"rope_type": "default"}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        written["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        written |= {name: getattr(scaling, name) for name in ("low_freq_factor", "high_freq_factor")}
    if scaling.kind == "yarn":
        written |= {name: getattr(scaling, name) for name in ("beta_slow", "beta_fast", "truncate", "attention_factor")}
    return written
