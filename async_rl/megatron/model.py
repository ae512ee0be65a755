"""The model definition that both the learner and the inference engine use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.errors import ConfigError
from async_rl.megatron import host, weight_gradients
from async_rl.megatron.attention.context_parallel import divide
from async_rl.megatron.attention.rope_scaling import scale_rope, set_attention_factor
from async_rl.megatron.attention.rotary import join_rotary
from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.compat import GPTModel, TransformerBlockSubmodules, TransformerConfig, parallel_state
from async_rl.megatron.experts import options as experts
from async_rl.megatron.experts.grouped import fits_grouped_products
from async_rl.megatron.heads import output_layer, value_head
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.layers.norms import attach_post_norms
from async_rl.megatron.layers.specs import LayerSpec, block_spec
from async_rl.megatron.layers.swiglu import fuses_swiglu
from async_rl.megatron.parallel import ModelParallelSizes, context_group, current_parallel_sizes
from async_rl.megatron.parameters.full_parameters import bare, initialize_parameters, padded_vocab
from async_rl.models.shape import ModelShape

weight_gradients.install()

Recompute = Literal["none", "selective", "full"]
FP8_MULTIPLE = 16
"""FP8 matrix products need a number of tokens divisible by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Options that save memory or time in training without changing results, except for the precision of `fp8`."""

    sequence: bool = False
    """Sequence parallelism among tensor ranks."""
    recompute: Recompute = "none"
    fp8: bool = False
    logits_bytes: int = 2**31
    """Memory for logits in float32 and their gradients. A row that needs more is computed in chunks of tokens."""


PLAIN = ComputeOptions()


def build_model(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    layer_spec: LayerSpec = "local",
    attention: type[nn.Module] | None = None,
    fused_swiglu: bool | None = None,
    grouped_experts: bool | None = None,
) -> GPTModel:
    """Build this rank's part of the model. Initial weights depend on `seed` and not on the parallel layout.

    `seed` None: all weights are 0 until others are loaded, because drawing those of a large model takes minutes.
    Call `parallel.initialize` before. `attention` replaces the self-attention module of each layer. `fused_swiglu` and
    `grouped_experts` None: where the device has the kernels.
    """
    (model,) = build_chunks(
        shape,
        device=device,
        dtype=dtype,
        seed=seed,
        layer_spec=layer_spec,
        attention=attention,
        fused_swiglu=fused_swiglu,
        grouped_experts=grouped_experts,
    )
    return model


def build_chunks(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    layer_spec: LayerSpec = "local",
    attention: type[nn.Module] | None = None,
    compute: ComputeOptions = PLAIN,
    fused_swiglu: bool | None = None,
    grouped_experts: bool | None = None,
) -> list[GPTModel]:
    """Like `build_model`, but returns all chunks of this rank: several with an interleaved pipeline."""
    check_division(shape, current_parallel_sizes())
    with host.quiet():
        config = transformer_config(shape, device=device, dtype=dtype, compute=compute, layer_spec=layer_spec)
    if layer_spec == "local":
        # Megatron then calls the module that block_spec gives its MLPs, which need not be one of Transformer Engine's
        config.use_te_activation_func = fused_swiglu if fused_swiglu is not None else fuses_swiglu(shape, device)
    if grouped_experts is None:
        grouped_experts = layer_spec == "local" and fits_grouped_products(shape, device, dtype)
    spec = partial(block_spec, shape, config, name=layer_spec, attention=attention, grouped_experts=grouped_experts)
    chunks = [_build_chunk(shape, config, place, device, spec(place=place)) for place in _places()]
    for chunk in chunks:
        output_layer.attach(chunk, shape, bytes_at_once=compute.logits_bytes)
    for chunk in chunks:
        _cast_parameters(chunk, dtype)
    initialize_parameters(nn.ModuleList(chunks), shape, seed=seed)
    return chunks


def _places() -> list[int | None]:
    """Megatron's indexes of this rank's chunks: from 0, or None if there is only one."""
    chunks = current_parallel_sizes().virtual_stages
    return list(range(chunks)) if chunks > 1 else [None]


def _build_chunk(
    shape: ModelShape,
    config: TransformerConfig,
    place: int | None,
    device: torch.device,
    layers: TransformerBlockSubmodules,
) -> GPTModel:
    with host.on_host(), host.quiet():
        model = GPTModel(
            config,
            layers,  # pyright: ignore[reportArgumentType]  # or a layer's
            vocab_size=padded_vocab(shape, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=place),
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,  # pyright: ignore[reportArgumentType]  # annotated int, used as a float
            share_embeddings_and_output_weights=shape.tied_embeddings,
            vp_stage=place,
        )
        attach_post_norms(model, shape)
        if shape.rope_scaling is not None:
            scale_rope(model, shape.rope_scaling, shape.rope_theta)
        if shape.window is not None and shape.window.rope_theta is not None:
            join_rotary(model, shape.window.rope_theta)
        model = model.to(device)
    if shape.scaled_embeddings and model.pre_process:
        _scale_embeddings(model, shape.hidden)
    value_head.attach(model, shape.head, shape.hidden, config.params_dtype, device)
    return model


def transformer_config(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    compute: ComputeOptions = PLAIN,
    layer_spec: LayerSpec = "local",
) -> TransformerConfig:
    division = current_parallel_sizes()
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.activation],
        softmax_scale=shape.query_scalar**-0.5 if shape.query_scalar is not None else None,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        **_windows(shape),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=division.tensor,
        pipeline_model_parallel_size=division.pipeline,
        virtual_pipeline_model_parallel_size=division.virtual_stages if division.virtual_stages > 1 else None,
        context_parallel_size=division.context,
        expert_model_parallel_size=division.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=compute.sequence,
        **experts.options(shape.experts, grouped=layer_spec == "transformer_engine"),
        **_RECOMPUTE[compute.recompute],
        **(_FP8 if compute.fp8 else {}),
        # Weights come from `initialize_parameters`, the same for every layout.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # Packed rows differ in length, which Megatron's default expert dispatcher refuses even without experts.
        variable_seq_lengths=division.pipeline > 1,
        # With two stages, both neighbours are the same rank, so batched forward and backward messages could be confused.
        overlap_p2p_comm=division.virtual_stages > 1,
        batch_p2p_comm=division.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",
        # Its layers add to the gradient buffers of DistributedDataParallel; Megatron's own do after `add_in_products`.
        gradient_accumulation_fusion=layer_spec == "transformer_engine" and device.type == "cuda",
        # Each of these needs a compiled extension, or torch's compiler. We rotate and activate at once ourselves.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    if shape.rope_scaling is not None:
        set_attention_factor(config, shape.rope_scaling)
    return config


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": _gelu_tanh}


def _scale_embeddings(model: GPTModel, hidden: int) -> None:
    """Multiply embeddings by sqrt(hidden), rounded to the model's dtype as transformers does."""
    factor = torch.tensor(hidden**0.5).to(model.config.params_dtype).item()

    def scaled(_layer: nn.Module, _given: object, embedded: Tensor) -> Tensor:
        return embedded * factor

    model.embedding.register_forward_hook(scaled)


def _windows(shape: ModelShape) -> dict[str, Any]:
    if (window := shape.window) is None:
        return {}
    return {
        "window_size": (window.tokens - 1, 0),
        "window_attn_skip_freq": [int(layer in window.layers) for layer in range(shape.layers)],
    }


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    # MLPs hold most activations; fused attention kernels recompute theirs anyway.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
"""Current (tensorwise) scaling has no history that checkpoints would have to contain."""


def packed_params(cu_seqlens: Tensor, max_length: int | None = None) -> RowPacking:
    """Boundaries of a packed row: sequence i is [cu_seqlens[i], cu_seqlens[i + 1]). `max_length` avoids a device sync."""
    cu_seqlens = cu_seqlens.to(torch.int32)
    longest = max_length if max_length is not None else int(cu_seqlens.diff().max())
    return RowPacking(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def forward_packed(model: nn.Module, token_ids: Tensor, positions: Tensor, packing: RowPacking) -> PackedOutput:
    """Compute a packed row up to the last hidden states of this pipeline stage."""
    chunk = bare(model)
    # a row of one token trains nothing and only fills up a schedule, so routers do not count it
    is_padding = torch.full_like(token_ids, len(token_ids) == 1, dtype=torch.bool)
    tokens, shards = len(token_ids), None
    if chunk.config.context_parallel_size > 1:
        own = divide(token_ids, packing, context_group(), multiple=_multiple(chunk.config))
        token_ids, positions, packing, shards = own
        is_padding = shards.shard(is_padding, filler=True)
    else:
        if missing := -tokens % _multiple(chunk.config):
            token_ids, positions, packing = _lengthened(token_ids, positions, packing, missing)
            is_padding = torch.cat([is_padding, is_padding.new_ones(missing)])
        packing = replace(packing, positions=positions)  # a copy, so that its rotations last as long as this pass
    # Megatron wants logits gathered while the process has an engine; hidden states, which are read here, stay as they are
    given = {"packed_seq_params": packing, "runtime_gather_output": True, **_for_routers(chunk, is_padding)}
    if not chunk.post_process:
        return PackedOutput(hidden=model(token_ids[None], positions[None], None, **given), tokens=tokens)
    with chunk.output_layer.skipped():
        hidden = model(token_ids[None], positions[None], None, **given)[0]
    return PackedOutput(
        hidden=hidden,
        tokens=tokens,
        output_layer=chunk.output_layer,
        weight=output_layer.weight_of(chunk),
        value_head=value_head.of(chunk),
        shards=shards,
    )


def _for_routers(chunk: GPTModel, is_padding: Tensor) -> dict[str, Tensor]:
    """The argument that tells routers which tokens not to count."""
    return {"padding_mask": is_padding[None]} if chunk.config.num_moe_experts is not None else {}


def _multiple(config: TransformerConfig) -> int:
    """The number of tokens that a rank computes must be divisible by this."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return parts * (FP8_MULTIPLE if config.fp8 else 1)


def _lengthened(token_ids: Tensor, positions: Tensor, packing: RowPacking, missing: int) -> tuple[Tensor, Tensor, RowPacking]:
    """Append a sequence of padding, to which the others cannot attend."""
    filler = positions.new_zeros(missing)
    ends = packing.cu_seqlens_q
    return (
        torch.cat([token_ids, filler]),
        torch.cat([positions, torch.arange(missing, device=positions.device)]),
        packed_params(torch.cat([ends, ends[-1:] + missing]), max(packing.max_seqlen_q, missing)),
    )


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, RowPacking]:
    """Concatenate sequences to a packed row: token ids, positions and boundaries."""
    lengths = [len(sequence) for sequence in sequences]
    device = sequences[0].device
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return torch.cat(list(sequences)), positions, packed_params(cu_seqlens, max(lengths))


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters; torch's norms are float32 regardless of Megatron's configuration."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def check_division(shape: ModelShape, division: ModelParallelSizes) -> None:
    """Raise ConfigError unless the model can be divided so."""
    tensor, stages = division.tensor, division.pipeline * division.virtual_stages
    if shape.kv_heads % tensor or shape.ffn % tensor:
        raise ConfigError(
            f"learner.parallel.tensor ({tensor}) must divide the model's kv_heads ({shape.kv_heads}) and ffn ({shape.ffn})"
        )
    experts_of_a_layer = shape.experts.number if shape.experts is not None else 1
    if experts_of_a_layer % division.expert:
        raise ConfigError(
            f"learner.parallel.expert ({division.expert}) must divide the number of experts in a layer ({experts_of_a_layer})"
        )
    if shape.experts is not None and shape.experts.shared_ffn is not None and shape.experts.shared_ffn % tensor:
        raise ConfigError(
            f"learner.parallel.tensor ({tensor}) must divide the width of the shared expert ({shape.experts.shared_ffn})"
        )
    if shape.layers % stages:
        raise ConfigError(
            f"learner.parallel.pipeline x virtual_stages ({stages}) must divide the model's layers ({shape.layers})"
        )
