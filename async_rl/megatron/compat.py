"""Imports from megatron-core, and workarounds for differences between its versions."""

# ruff: noqa: F401
from __future__ import annotations

import importlib
from typing import cast

import torch
import torch.distributed as dist

from async_rl.megatron import host, transformer_engine

if host.is_needed():
    host.stand_in_for_cuda()  # before Megatron's modules take the originals by name

with host.importing():
    TRANSFORMER_ENGINE_ERROR = transformer_engine.hide_if_broken()
    """Why the installed Transformer Engine cannot be imported, or ""."""
    import megatron.core.transformer.attention as attention_module
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import HAVE_TE as HAVE_TRANSFORMER_ENGINE
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.transformer.utils import is_layer_window_attention


def _tensor_group(
    tp_group: dist.ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> dist.ProcessGroup | None:
    """Replacement without the warning that Megatron's own layers would trigger on every forward pass."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if is_expert:
        return cast("dist.ProcessGroup", parallel_state.get_expert_tensor_parallel_group(check_initialized))
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group(check_initialized))


for _module in ("tensor_parallel.layers", "tensor_parallel.mappings", "distributed.finalize_model_grads"):
    with host.quiet():
        vars(importlib.import_module(f"megatron.core.{_module}"))["get_tensor_model_parallel_group_if_none"] = _tensor_group


for _module in (
    "distributed.param_and_grad_buffer",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
):
    # Megatron calls two collectives by names that torch has deprecated, which warns on every call.
    for _alias, _name in (("dist_reduce_scatter_func", "reduce_scatter_single"), ("dist_all_gather_func", "all_gather_single")):
        _known = vars(importlib.import_module(f"megatron.core.{_module}"))
        if _alias in _known and hasattr(dist, _name):
            _known[_alias] = getattr(dist, _name)


with host.quiet():
    # Megatron's generators are unused (no dropout, our own initial weights); this makes forking them free.
    importlib.import_module("megatron.core.tensor_parallel.random").initialize_rng_tracker(inference_rng_tracker=True)

if host.is_needed():
    with host.quiet():
        # Recomputation saves and restores the GPU's random state; without a GPU there is none.
        vars(importlib.import_module("megatron.core.tensor_parallel.random")).update(
            _get_cuda_rng_state=lambda *_, **__: torch.empty(0, dtype=torch.uint8), _set_cuda_rng_state=lambda *_, **__: None
        )


HAVE_FLASH_ATTENTION = bool(
    getattr(attention_module, "HAVE_FA4", False)
    or attention_module.HAVE_FA3
    # Megatron's own check needs the package's version, which FlashAttention 4 alone does not have under this name.
    or (attention_module.flash_attn_varlen_func is not None and attention_module.is_fa_min_version("2.7.3"))
)
"""Whether Megatron's paged kernel can be used. Read once, because the engine later sets HAVE_FA3 to pass an assertion."""
