"""Reads and writes config.json of Hugging Face folders, for the families in `families.py`.

A setting that would be computed wrongly is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.models.families import FAMILIES, NOT_CARRIED, Family, family_of
from async_rl.models.rope import read_scaling, rope_refusals, written_scaling
from async_rl.models.shape import Experts, ModelShape, Window

# -- reading --------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        hint = "" if folder.exists() else "; a model of the Hugging Face Hub is given by its `name` instead of a folder"
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object")
    return found  # pyright: ignore[reportUnknownVariableType]


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of a model. Raises ConfigError naming what is missing or not supported."""
    found, path = read_config(folder), folder / "config.json"
    if problems := list(refusals(found)):
        raise ConfigError(f"{path} has {' and '.join(problems)}")
    try:
        return _shape(found)
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} has an invalid value: {error}") from error


def read_dtype(folder: Path) -> str:
    """torch's name of the weights' dtype; float32 if missing or null."""
    found = read_config(folder)
    return next((said for key in ("dtype", "torch_dtype") if (said := found.get(key)) is not None), "float32")


def refusals(found: Mapping[str, Any]) -> Iterator[str]:
    """Names of all settings in a config.json that are not supported."""
    name = found.get("model_type")
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        why = f" ({NOT_CARRIED[name]})" if name in NOT_CARRIED else ""
        yield f"model_type {name!r}{why}; supported are {', '.join(family.name for family in FAMILIES)}"
        return
    key, activation = _ACTIVATIONS[family.activation]
    if found.get(key, activation) != activation:
        yield f"{key} {found[key]!r}, where only {activation!r} is supported"
    if found.get("quantization_config"):
        yield "a quantization_config: only weights that are not quantized are supported"
    known = {"full_attention", "sliding_attention"} if family.windows == "by layer" else {"full_attention"}
    kinds = {kind for kind in found.get("layer_types") or () if kind not in known}
    if kinds or found.get("use_sliding_window") or (family.name in _NEVER_SLIDING and found.get("sliding_window")):
        yield f"{' and '.join(sorted(kinds)) or 'a sliding window'}, which is not supported"
    if unknown := [key for key in _MUST_BE_OFF if found.get(key)]:
        yield f"{' and '.join(unknown)}, which is not supported"
    if family.qkv_bias and found.get("qkv_bias") is False:
        yield "no biases on query, key and value (qkv_bias), which is not supported"
    rope = _rope(found, family)
    yield from rope_refusals(rope)
    if family.windows == "by layer" and rope["rope_type"] == "yarn":
        yield "rope_type 'yarn' in one of two kinds of layers, which is not supported"
    if _own_rope(found, "sliding_attention").get("rope_type", "default") != "default":
        yield "scaled rope in layers with a sliding window, which is not supported"
    if family.experts != "none" and found.get("norm_topk_prob") and found.get("num_experts_per_tok") == 1:
        yield "norm_topk_prob with one expert per token, whose router could not learn"


_ACTIVATIONS = {"silu": ("hidden_act", "silu"), "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh")}
"""Key and value in config.json."""
_MUST_BE_OFF = (
    "attention_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
)  # fmt: skip
_NEVER_SLIDING = ("llama", "olmo2")
"""Families without `use_sliding_window`, where a `sliding_window` alone is a different model."""


def _rope(found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The settings of all layers, or of those without a window if these have their own."""
    if family.windows != "by layer":
        return _rope_settings(found)
    return _rope_settings({"rope_theta": 1_000_000.0, **found, "rope_parameters": _own_rope(found, "full_attention")})


def _own_rope(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The part of `rope_parameters` for one kind of layer."""
    by_kind: Mapping[str, Any] = found.get("rope_parameters") or {}
    return by_kind.get(kind) or {}


def _rope_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings: `rope_parameters` (transformers 5), or `rope_scaling` and top-level keys (earlier)."""
    outside = {key: found[key] for key in ("rope_theta", "partial_rotary_factor") if key in found}
    scaling: list[dict[str, Any]] = [
        found.get(key) or {} for key in ("rope_scaling", "rope_parameters")
    ]  # null counts as missing
    old, new = scaling
    kind = old.get("type", "default")
    return {"rope_type": kind, "rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **outside, **old, **new}


def _shape(found: Mapping[str, Any]) -> ModelShape:
    family = next(family for family in FAMILIES if family.name == found["model_type"])
    heads, rope = found["num_attention_heads"], _rope(found, family)
    kv_heads, head_dim = found.get("num_key_value_heads"), found.get("head_dim")
    return ModelShape(
        family=family.name,
        **family.features,
        hidden=found["hidden_size"],
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim if head_dim is not None else found["hidden_size"] // heads,
        ffn=found["intermediate_size"],
        vocab_size=found["vocab_size"],
        max_positions=found["max_position_embeddings"],
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=read_scaling(rope, found["max_position_embeddings"]),
        norm_eps=found["rms_norm_eps"],
        window=_window(found, family),
        query_scalar=found.get("query_pre_attn_scalar", 256) if family.windows == "by layer" else None,
        experts=_experts(found) if family.experts != "none" else None,
        tied_embeddings=found.get("tie_word_embeddings", family.tied_embeddings),
        init_std=found.get("initializer_range", 0.02),
    )


def _window(found: Mapping[str, Any], family: Family) -> Window | None:
    """None also if the window is as long as the longest sequence, unless its layers differ in more than that."""
    tokens = found.get("sliding_window", 4096) if family.windows != "none" else None  # transformers' value if it is missing
    every = range(found["num_hidden_layers"])
    if family.windows == "by layer" and tokens is not None:
        pattern = found.get("sliding_window_pattern", 6)
        kinds = found.get("layer_types") or [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in every
        ]
        theta = _own_rope(found, "sliding_attention").get("rope_theta", found.get("rope_local_base_freq", 10_000.0))
        layers = tuple(layer for layer in every if kinds[layer] == "sliding_attention")
        return Window(tokens=tokens, layers=layers, rope_theta=float(theta))
    if tokens is None or tokens >= found["max_position_embeddings"]:
        return None
    return Window(tokens=tokens, layers=tuple(every))


def _experts(found: Mapping[str, Any]) -> Experts:
    # transformers 5 writes num_local_experts for what it reads as num_experts
    number = found["num_experts"] if "num_experts" in found else found["num_local_experts"]
    step, without = found.get("decoder_sparse_step", 1), found.get("mlp_only_layers") or ()
    return Experts(
        number=number,
        per_token=found["num_experts_per_tok"],
        ffn=found["moe_intermediate_size"],
        layers=tuple(layer for layer in range(found["num_hidden_layers"]) if layer not in without and (layer + 1) % step == 0),
        shared_ffn=found["shared_expert_intermediate_size"] if found["model_type"] == "qwen2_moe" else None,
        weights_sum_to_one=found.get("norm_topk_prob", False),
    )


# -- writing --------------------------------------------------------------------------------------------------------------


def written_config(shape: ModelShape, *, dtype: str) -> dict[str, Any]:
    """A config.json for transformers 4 and 5."""
    family = family_of(shape)
    rope = written_scaling(shape.rope_scaling)
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_theta": shape.rope_theta, **rope},
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_scaling is not None else None,
        "rms_norm_eps": shape.norm_eps,
        **dict([_ACTIVATIONS[shape.activation]]),
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family.windows != "none":
        written["sliding_window"] = shape.window.tokens if shape.window is not None else None
    if family.windows == "by layer":
        written |= _written_by_layer(shape, written["rope_parameters"])
    if shape.experts is not None and shape.experts.shared_ffn is not None:
        written["shared_expert_intermediate_size"] = shape.experts.shared_ffn
    if shape.experts is not None:
        written |= {
            "num_experts": shape.experts.number,
            "num_local_experts": shape.experts.number,
            "num_experts_per_tok": shape.experts.per_token,
            "moe_intermediate_size": shape.experts.ffn,
            "norm_topk_prob": shape.experts.weights_sum_to_one,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(shape.layers) if layer not in shape.experts.layers],
        }
    return written


def _written_by_layer(shape: ModelShape, rope: Mapping[str, Any]) -> dict[str, Any]:
    assert shape.window is not None
    is_windowed = [layer in shape.window.layers for layer in range(shape.layers)]
    in_window = {"rope_type": "default", "rope_theta": shape.window.rope_theta}
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in is_windowed],
        "query_pre_attn_scalar": shape.query_scalar,
        "rope_parameters": {"full_attention": rope, "sliding_attention": in_window},
        "rope_local_base_freq": shape.window.rope_theta,
    }
