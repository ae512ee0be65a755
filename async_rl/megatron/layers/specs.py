"""Layer specs: Megatron's local modules with our norm and attention, or Transformer Engine's."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from async_rl.errors import ConfigError
from async_rl.megatron import transformer_engine
from async_rl.megatron.attention.self_attention import PackedAttention, SelfAttentionOfLayer
from async_rl.megatron.compat import (
    HAVE_TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINE_ERROR,
    IdentityOp,
    LayerNormImpl,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from async_rl.megatron.experts.grouped import GroupedExperts
from async_rl.megatron.experts.routing import ObservedRouter
from async_rl.megatron.layers.norms import KeyNorm, QueryNorm, norm_of
from async_rl.megatron.layers.swiglu import FusedSwiglu
from async_rl.models.shape import Experts, ModelShape

LayerSpec = Literal["local", "transformer_engine"]


def block_spec(
    shape: ModelShape,
    config: TransformerConfig,
    place: int | None,
    name: LayerSpec,
    attention: type[nn.Module] | None,
    *,
    grouped_experts: bool,
) -> TransformerBlockSubmodules:
    """Spec of the layers of one chunk. `attention` replaces the self-attention module, `grouped_experts` the local experts.
    Raises ConfigError.
    """
    if name == "transformer_engine":
        require_transformer_engine()
        refuse_own_norms(shape)
    dense = _layer_spec(shape, name, attention, experts=None)
    sparse = _layer_spec(shape, name, attention, experts=shape.experts) if shape.experts is not None else dense
    if grouped_experts and shape.experts is not None:
        experts = _mlp(sparse)
        if isinstance(experts.experts, partial):
            experts.experts = partial(GroupedExperts, *experts.experts.args, **experts.experts.keywords)
        else:
            experts.experts.module = GroupedExperts
    for each in (dense, sparse) if config.use_te_activation_func else ():
        _fuse_activations(_mlp(each))
    is_sparse = [shape.experts is not None and layer in shape.experts.layers for layer in _layers_of(config, place)]
    return TransformerBlockSubmodules(
        layer_specs=[sparse if each else dense for each in is_sparse],
        layer_norm=norm_of(shape) if name == "local" else LayerNormImpl,  # pyright: ignore[reportArgumentType]  # classes are what it takes
    )


def _layers_of(config: TransformerConfig, place: int | None) -> range:
    first = get_transformer_layer_offset(config, vp_stage=place)
    return range(first, first + get_num_layers_to_build(config, vp_stage=place))


def _layer_spec(
    shape: ModelShape, name: LayerSpec, attention: type[nn.Module] | None, *, experts: Experts | None
) -> ModuleSpec:
    number = experts.number if experts is not None else None
    if name == "transformer_engine":
        layer: Any = get_gpt_layer_with_transformer_engine_spec(
            num_experts=number, moe_grouped_gemm=True, qk_layernorm=shape.qk_norm
        )
    else:
        layer = get_gpt_layer_local_spec(num_experts=number, normalization="RMSNorm", qk_layernorm=shape.qk_norm)
        inside = _self_attention(layer).submodules
        before = norm_of(shape) if shape.norms != "after" else IdentityOp
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = before
        if shape.qk_norm:
            per_head = shape.qk_norm_over == "head"
            inside.q_layernorm, inside.k_layernorm = (norm_of(shape),) * 2 if per_head else (QueryNorm, KeyNorm)
        inside.core_attention = PackedAttention
    if experts is not None:
        _mlp(layer).router = ObservedRouter
    _self_attention(layer).module = attention if attention is not None else SelfAttentionOfLayer
    return layer


def _mlp(layer: Any) -> Any:
    return _inside(layer.submodules.mlp)


def _inside(module: Any) -> Any:
    """Return the submodules of a module that is to be built."""
    return module.keywords["submodules"] if isinstance(module, partial) else module.submodules


def _fuse_activations(mlp: Any) -> None:
    """Give our activation to an MLP, or to the experts of a layer and the one that they share."""
    for name in ("experts", "shared_experts"):
        if getattr(mlp, name, None) is not None:
            _fuse_activations(_inside(getattr(mlp, name)))
    if hasattr(mlp, "activation_func"):
        mlp.activation_func = FusedSwiglu


def _self_attention(layer: Any) -> Any:
    return layer.submodules.self_attention


def refuse_own_norms(shape: ModelShape) -> None:
    """Raise ConfigError if Transformer Engine lacks the model's norms."""
    if shape.norms != "before" or shape.centered_norms or shape.qk_norm_over != "head":
        raise ConfigError(
            f"model.layer_spec: transformer_engine lacks the norms of {shape.family or 'this model'}; use `local`"
        )


def require_transformer_engine() -> None:
    """Raise ConfigError unless Megatron can use Transformer Engine on a GPU of this machine."""
    if HAVE_TRANSFORMER_ENGINE and torch.cuda.is_available():
        return
    if TRANSFORMER_ENGINE_ERROR or (transformer_engine.is_installed() and not HAVE_TRANSFORMER_ENGINE):
        reason = TRANSFORMER_ENGINE_ERROR or "this megatron-core does not find in it what it imports"
        raise ConfigError(
            f"model.layer_spec: transformer_engine is installed but cannot be used ({reason}); docs/gpu.md says which version "
            "fits and how to build its part for torch, and `local` works everywhere"
        )
    raise ConfigError(
        "model.layer_spec: transformer_engine needs a GPU and the extra `gpu` (pip install 'async-rl[gpu]', then the commands "
        "of docs/gpu.md); `local` works everywhere"
    )
