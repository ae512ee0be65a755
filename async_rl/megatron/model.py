"""The one model definition: the learner trains it, the engine samples from it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.errors import ConfigError
from async_rl.megatron import host
from async_rl.megatron.attention import PackedAttention
from async_rl.megatron.compat import (
    GPTModel,
    ModuleSpec,
    PackedSeqParams,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    parallel_state,
)
from async_rl.megatron.parameters import initialize_parameters, padded_vocab
from async_rl.model_shape import ModelShape

LayerSpec = Literal["local", "transformer_engine"]


def build_model(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    layer_spec: LayerSpec = "local",
    attention: type[nn.Module] | None = None,
) -> GPTModel:
    """This rank's part of the model, with weights that depend on `seed` and not on how the ranks are divided.

    `parallel.initialize` must have run. `attention` replaces the self-attention module of each layer.
    """
    with host.quiet():
        config = transformer_config(shape, device=device, dtype=dtype)
    _check_division(shape, config)
    spec = _layer_spec(shape, layer_spec)
    if attention is not None:
        _self_attention(spec).module = attention
    with host.on_host(), host.quiet():
        model = GPTModel(
            config,
            spec,
            vocab_size=padded_vocab(shape, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,  # pyright: ignore[reportArgumentType]  # annotated int, used as a float
            share_embeddings_and_output_weights=shape.tied_embeddings,
        ).to(device)
    _cast_parameters(model, dtype)
    initialize_parameters(model, shape, seed=seed)
    return model


def transformer_config(shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> TransformerConfig:
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=pipeline,
        # Weights come from `initialize_parameters`, the same for every layout.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # Packed rows differ in length; Megatron refuses that with its default expert dispatcher, even without experts.
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Each of these needs a compiled extension.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def packed_params(cu_seqlens: Tensor, max_length: int | None = None) -> PackedSeqParams:
    """How a packed row is divided: sequence i is [cu_seqlens[i], cu_seqlens[i + 1]). `max_length` saves a device sync."""
    cu_seqlens = cu_seqlens.to(torch.int32)
    longest = max_length if max_length is not None else int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def forward_packed(model: nn.Module, token_ids: Tensor, positions: Tensor, packing: PackedSeqParams) -> Tensor:
    """Logits [tokens, vocabulary of this tensor rank] of a packed row; on earlier pipeline stages, its hidden states."""
    output = model(token_ids[None], positions[None], None, packed_seq_params=packing)
    return output[0] if parallel_state.is_pipeline_last_stage() else output


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, PackedSeqParams]:
    """Token ids, positions and division of one row that holds all `sequences`."""
    lengths = [len(sequence) for sequence in sequences]
    device = sequences[0].device
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return torch.cat(list(sequences)), positions, packed_params(cu_seqlens, max(lengths))


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """torch's norms come as float32, whatever Megatron was asked for."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _layer_spec(shape: ModelShape, name: LayerSpec) -> ModuleSpec:
    if name == "transformer_engine":
        _require_transformer_engine()
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    _self_attention(spec).submodules.core_attention = PackedAttention
    return spec


def _self_attention(layer: Any) -> Any:
    return layer.submodules.self_attention


def _require_transformer_engine() -> None:
    """The package of that name can be an empty shell, whose `pytorch` part is the one that counts."""
    try:
        found = importlib.util.find_spec("transformer_engine.pytorch") is not None
    except ModuleNotFoundError:
        found = False
    if not found or not torch.cuda.is_available():
        raise ConfigError(
            "model.layer_spec: transformer_engine needs a GPU and the extra `gpu` (pip install 'async-rl[gpu]'); "
            "`local` works everywhere"
        )


def _check_division(shape: ModelShape, config: TransformerConfig) -> None:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if shape.kv_heads % tensor or shape.ffn % tensor:
        raise ConfigError(
            f"learner.parallel.tensor ({tensor}) must divide the model's kv_heads ({shape.kv_heads}) and ffn ({shape.ffn})"
        )
    if shape.layers % pipeline:
        raise ConfigError(f"learner.parallel.pipeline ({pipeline}) must divide the model's layers ({shape.layers})")
