"""Mixture-of-experts layers: Megatron's options, and fixes that they need without a GPU.

Tokens are never dropped, and Megatron's balancing losses are off (routing.py has ours). The router computes in float32, so that
the order of nearly equal experts does not depend on the precision of the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from async_rl.megatron import host
from async_rl.models.shape import Experts

with host.importing():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher


def options(experts: Experts | None, *, grouped: bool) -> dict[str, Any]:
    """Arguments for Megatron's TransformerConfig. `grouped`: compute all experts of a rank at once (Transformer Engine)."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_shared_expert_gate": experts.shared_ffn is not None,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.weights_sum_to_one,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
    }


def _counts_for_gloo(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert token counts to lists for gloo, which Megatron does only when it copies from a GPU."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


if host.is_needed():
    token_dispatcher.maybe_move_tensor_to_cpu = _counts_for_gloo
if not hasattr(moe_utils, "te_general_gemm"):  # some versions read it without Transformer Engine
    moe_utils.te_general_gemm = None
