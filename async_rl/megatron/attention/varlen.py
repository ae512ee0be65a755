"""Causal attention over a packed row as one fused kernel: FlashAttention 4, if it is installed and right, or else torch's.

torch's is FlashAttention 2, which leaves half of a Hopper GPU unused.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import structlog
import torch
from torch import Tensor

from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.compat import PackedSeqParams

log = structlog.get_logger("async_rl.megatron")

FUSED_DTYPES = (torch.bfloat16, torch.float16)
FLASH_4_GPUS = (9, 10, 11)
"""Major compute capabilities for which FlashAttention 4 has both passes."""
TOLERANCE = 0.02
"""Difference that is allowed to kernels which round to bfloat16 in different places, each time by 0.002 of a number."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def can_use_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in FUSED_DTYPES


def varlen_kernel() -> Callable[..., Any]:
    """torch's variable-length attention. Imported on use, because it imports torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, scores: Scores) -> Tensor:
    """Attention of [tokens, heads, dim]; the last query of a sequence belongs to its last key."""
    if scores.window is None and query.is_cuda:
        sizes = query.dtype, query.shape[1], key.shape[1], query.shape[2]
        if (flash := flash_attention_4(query.device, *sizes)) is not None:
            return flash(query, key, value, packing, scores)
    return torch_varlen(query, key, value, packing, scores)


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, scores: Scores) -> Tensor:
    """torch's kernel. Emulates arguments that older releases lack."""
    kernel = varlen_kernel()
    known = inspect.signature(kernel).parameters
    options: dict[str, Any] = {"window_size": scores.window_size} if "window_size" in known else {"is_causal": True}
    if scores.window is not None and "window_size" not in known:
        raise NotImplementedError("torch's varlen attention has no sliding windows in this release; use a newer torch")
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        elif not takes_fewer_kv_heads(kernel, query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2]):
            key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    if scores.scale is not None:
        if "scale" in known:
            options["scale"] = scores.scale
        else:
            query = query * (scores.scale * query.shape[-1] ** 0.5)
    out = kernel(
        query, key, value, packing.cu_seqlens_q, packing.cu_seqlens_kv, packing.max_seqlen_q, packing.max_seqlen_kv, **options
    )
    assert isinstance(out, Tensor)
    return out


@cache
def flash_attention_4(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> Callable[..., Tensor] | None:
    """FlashAttention 4 for such heads; None if it is not installed, is not for this GPU, or differs from torch's kernel.

    Tried once with a few tokens, because its releases are made before they are tested on every GPU.
    """
    if torch.cuda.get_device_capability(device)[0] not in FLASH_4_GPUS or dim > 128:
        return None
    # fewer queries than keys, as with context parallelism; and so many sequences that it takes other kernels
    for queries, keys in (([5, 295], [9, 391]), ([2] * 300, [2] * 300)):
        packing = _packing(queries, keys, device)
        given = _random(device, dtype, sum(queries), sum(keys), heads, kv_heads, dim)
        try:
            if not _has_flash_attention_4():
                return None
            found = _with_gradients(lambda q, k, v, packing=packing: _flash(q, k, v, packing, Scores()), given)
        except Exception as error:  # a compiler of its own, with errors of its own; or an older FlashAttention that is broken
            log.warning(
                "FlashAttention 4 cannot be used: torch's attention takes its place", reason=f"{type(error).__name__}: {error}"
            )
            return None
        wanted = _with_gradients(lambda q, k, v, packing=packing: torch_varlen(q, k, v, packing, Scores()), given)
        if not _are_close(found, wanted):
            log.warning("FlashAttention 4 computes something else than torch's attention, which takes its place")
            return None
    return _flash


def _packing(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> PackedSeqParams:
    bounds = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in (queries, keys)]
    return PackedSeqParams(cu_seqlens_q=bounds[0], cu_seqlens_kv=bounds[1], max_seqlen_q=max(queries), max_seqlen_kv=max(keys))


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, scores: Scores) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    out, *_ = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=packing.cu_seqlens_q,
        cu_seqlens_k=packing.cu_seqlens_kv,
        max_seqlen_q=packing.max_seqlen_q,
        max_seqlen_k=packing.max_seqlen_kv,
        softmax_scale=scores.scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _has_flash_attention_4() -> bool:
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


@cache
def takes_fewer_kv_heads(
    kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> bool:
    """Whether a kernel without the argument `enable_gqa` shares each key head among query heads, gradients included.

    Tried once with a few tokens, because releases differ and none says it.
    """
    bounds = torch.tensor([0, 4], dtype=torch.int32, device=device)
    given = _random(device, dtype, 4, 4, heads, kv_heads, dim)
    try:
        shared = _with_gradients(lambda q, k, v: kernel(q, k, v, bounds, bounds, 4, 4), given)
    except (RuntimeError, ValueError):
        return False
    repeated = _with_gradients(lambda q, k, v: kernel(q, _repeated(k, heads), _repeated(v, heads), bounds, bounds, 4, 4), given)
    return _are_close(shared, repeated)


def _random(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, heads: int, kv_heads: int, dim: int
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim)]
    return [torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes]


def _with_gradients(attend: Attend, given: Sequence[Tensor]) -> list[Tensor]:
    """What a kernel computes of queries, keys and values, and their gradients."""
    with torch.enable_grad():
        own = [each.clone().requires_grad_() for each in given]
        out = attend(*own)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), own)]


def _are_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether each tensor differs by at most TOLERANCE of its norm: averages over many keys are small, errors in them too."""
    return all(
        one.shape == other.shape and bool((one.float() - other.float()).norm() <= TOLERANCE * other.float().norm())
        for one, other in zip(found, wanted, strict=True)
    )


def _repeated(heads: Tensor, count: int) -> Tensor:
    return heads.repeat_interleave(count // heads.shape[1], dim=1)
