"""A model's dimensions as Megatron-LM's arguments, which its checkpoints contain. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.errors import ConfigError
from async_rl.megatron.torch_dist.keys import are_alike, has_experts
from async_rl.models.shape import Experts, ModelShape

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by."""


def arguments_of(shape: ModelShape) -> dict[str, Any]:
    """The arguments that decide what a model computes."""
    experts, scaling, window = shape.experts, shape.rope_scaling, shape.window
    kind, factor = (scaling.kind, scaling.factor) if scaling is not None else (None, None)
    found: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "rotary_seq_len_interpolation_factor": factor if kind == "linear" else None,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": factor if kind == "llama3" else 8.0,
        "normalization": "RMSNorm",
        "norm_epsilon": shape.norm_eps,
        "apply_layernorm_1p": shape.centered_norms,
        "qk_layernorm": shape.qk_norm,
        "qk_l2_norm": False,
        "swiglu": shape.activation == "silu",
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        "untie_embeddings_and_output_weights": not shape.tied_embeddings,
        "window_size": (window.tokens - 1, 0) if window is not None else None,
        "num_experts": experts.number if experts is not None else None,
    }
    if window is not None and len(window.layers) < shape.layers:
        found["window_attn_skip_freq"] = [int(layer in window.layers) for layer in range(shape.layers)]
    return found | (_of_experts(experts, shape) if experts is not None else {})


def _of_experts(experts: Experts, shape: ModelShape) -> dict[str, Any]:
    return {
        "moe_layer_freq": 1 if are_alike(shape) else [int(has_experts(layer, shape)) for layer in range(shape.layers)],
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.weights_sum_to_one,
        "moe_router_score_function": "softmax",
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_shared_expert_gate": experts.shared_ffn is not None,
    }


def shape_of(found: Mapping[str, Any], *, vocab_size: int) -> ModelShape:
    """The model that the arguments of a checkpoint describe. Raises KeyError and TypeError; see `differences` for the rest."""
    given = _completed(found)
    experts = None
    if given.get("num_experts"):
        experts = Experts(
            number=given["num_experts"],
            per_token=given["moe_router_topk"],
            ffn=given["moe_ffn_hidden_size"],
            layers=tuple(layer for layer, has in enumerate(_layers_with_experts(given)) if has),
            shared_ffn=given.get("moe_shared_expert_intermediate_size"),
            weights_sum_to_one=not given.get("moe_router_pre_softmax", False),
        )
    return ModelShape(
        hidden=int(given["hidden_size"]),
        layers=int(given["num_layers"]),
        heads=int(given["num_attention_heads"]),
        kv_heads=int(given["num_query_groups"]),
        head_dim=int(given["kv_channels"]),
        ffn=int(given["ffn_hidden_size"]),
        vocab_size=vocab_size,
        max_positions=int(given["max_position_embeddings"]),
        rope_theta=float(given["rotary_base"]),
        norm_eps=float(given["norm_epsilon"]),
        qkv_bias=bool(given["add_qkv_bias"]),
        qk_norm=bool(given["qk_layernorm"]),
        tied_embeddings=not given["untie_embeddings_and_output_weights"],
        experts=experts,
    )


def differences(found: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arguments of a checkpoint that describe another model: name, value, and the value of `shape`.

    Arguments that it lacks, from another version of Megatron-LM, are not compared, and the number of positions is not: it is
    often that of training.
    """
    given, wanted = _completed(found), _completed(arguments_of(shape))
    passed_over = {"max_position_embeddings", "group_query_attention"}
    if not wanted["use_rope_scaling"]:
        passed_over.add("rope_scaling_factor")
    if shape.experts is not None and are_alike(shape):
        passed_over.add("ffn_hidden_size")  # no layer has it
    for name in wanted.keys() & given.keys() - passed_over:
        theirs, ours = given[name], wanted[name]
        is_off = not theirs and not ours  # None, False and 0 all mean that a feature is not used
        if theirs != ours and not is_off:
            yield name, theirs, ours


def _completed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in one form, as Megatron-LM completes them. Raises KeyError if one is missing that all models have."""
    given = dict(found)
    if not given.get("group_query_attention"):
        given["num_query_groups"] = given["num_attention_heads"]
    if given.get("kv_channels") is None:
        given["kv_channels"] = given["hidden_size"] // given["num_attention_heads"]
    if given.get("num_experts"):
        given["moe_layer_freq"] = _layers_with_experts(given)
        if given.get("moe_ffn_hidden_size") is None:
            given["moe_ffn_hidden_size"] = given["ffn_hidden_size"]
    if given.get("window_size") is not None:
        given["window_size"] = tuple(given["window_size"])
    return given


def _layers_with_experts(given: Mapping[str, Any]) -> list[int]:
    every = given.get("moe_layer_freq", 1)
    if isinstance(every, int):
        return [int(layer % every == 0) for layer in range(given["num_layers"])]
    return [int(each) for each in every]


def not_said(shape: ModelShape) -> list[str]:
    """What Megatron-LM's arguments cannot say about a model."""
    scaling, window = shape.rope_scaling, shape.window
    of_llama3 = (1.0, 4.0, 8192)
    is_said = (
        scaling is None
        or scaling.kind == "linear"
        or (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions) == of_llama3
    )
    return [
        what
        for what, has in {
            "norms after attention and MLP": shape.norms != "before",
            "norms over all heads of query and key together": shape.qk_norm_over == "projection",
            "scaled embeddings": shape.scaled_embeddings,
            "its activation": shape.activation != "silu",
            "its scale of attention scores": shape.query_scalar not in (None, shape.head_dim),
            "the rope base of layers with a window": window is not None and window.rope_theta is not None,
            "the settings of its rope scaling": not is_said,
        }.items()
        if has
    ]


def written_arguments(shape: ModelShape, *, dtype: str, iteration: int, tokenizer: str) -> dict[str, Any]:
    """All arguments of a written checkpoint: the model's, and what else Megatron-LM looks for."""
    padded = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return arguments_of(shape) | {
        "seq_length": shape.max_positions,
        "add_position_embedding": True,  # its default, which does not matter with rope
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": shape.init_std,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": tokenizer,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "iteration": iteration,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }


def check_arguments(found: Mapping[str, Any], shape: ModelShape, *, checkpoint: str, config: str | None) -> None:
    """Raise ConfigError if a checkpoint's arguments describe another model than `config` does; None: than they can say."""
    try:
        wrong = sorted(differences(found, shape), key=lambda each: each[0])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{checkpoint}: its arguments are incomplete or invalid ({error})") from error
    if not wrong:
        return
    if config is not None:
        said = " and ".join(f"{name} is {theirs!r} there and {ours!r} here" for name, theirs, ours in wrong)
        raise ConfigError(f"{checkpoint} and {config} describe different models: {said}")
    said = " and ".join(f"{name} {theirs!r}" for name, theirs, _ in wrong)
    raise ConfigError(
        f"{checkpoint}: its arguments alone do not describe a supported model ({said}); if one of Hugging Face's families has "
        "this, name a folder of the model there: --like FOLDER"
    )
