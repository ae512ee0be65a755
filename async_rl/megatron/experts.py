"""Layers of several MLPs: what Megatron must be told of them, and what it lacks to compute them where there is no GPU.

Every token goes to the experts that its router prefers, and none is turned away. The router computes in float32: the order
of two experts that are nearly equal must not depend on the precision of the rest. There is no balancing loss.
"""

from __future__ import annotations

from typing import Any

import torch

from async_rl.megatron import host
from async_rl.models.shape import Experts

with host.importing():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher


def options(experts: Experts | None, *, grouped: bool) -> dict[str, Any]:
    """Of Megatron's TransformerConfig. `grouped` computes all experts of a rank at once, which takes Transformer Engine."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.weights_sum_to_one,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
    }


def _counts_as_gloo_wants_them(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts what it copies from a GPU; on the host there is nothing to copy, and gloo wants lists."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


if host.is_needed():
    token_dispatcher.maybe_move_tensor_to_cpu = _counts_as_gloo_wants_them
if not hasattr(moe_utils, "te_general_gemm"):  # some versions ask for it also where Transformer Engine is not installed
    moe_utils.te_general_gemm = None
