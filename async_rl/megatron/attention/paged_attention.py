"""Paged attention of the inference engine.

Replaces Megatron's method, which needs FlashAttention, by plain torch: on a CPU, and on GPUs without FlashAttention, all
requests that decode one token share one padded gather and one attention call.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.attention.self_attention import FUSED_DTYPES, Scores, SelfAttentionOfLayer, can_use_varlen, varlen_kernel
from async_rl.megatron.compat import HAVE_FLASH_ATTENTION, SelfAttention, attention_module
from async_rl.models.shape import ModelShape

log = structlog.get_logger("async_rl.megatron")

FLASH_PAGE = 256
"""FlashAttention 2, also inside torch, requires page sizes that are multiples of this many tokens."""

MAX_PADDED_SCORES = 1 << 22
"""Prompts are batched with padding up to this many attention scores; longer ones are computed one by one."""


class PagedSelfAttention(SelfAttentionOfLayer):
    """Self-attention with a paged kernel in plain torch."""

    def flash_decode_and_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqlens_k: Tensor,
        block_table: Tensor,
        is_decode_only: bool,
        softmax_offset: Tensor | None = None,
    ) -> Tensor:
        """q [tokens, 1, heads, dim]; k, v [pages, page, kv heads, dim]; returns like q."""
        if softmax_offset is not None:
            raise NotImplementedError("softmax_offset (attention sinks) is not supported by the paged attention")
        if q.shape[1] != 1:
            raise NotImplementedError("several query tokens per decoding request (speculation) are not supported")
        scores = Scores.of_layer(self.config, self.layer_number, self.config.softmax_scale)
        if can_use_varlen(q) and varlen_reads_pages(q.device, q.dtype, k.shape[1], *q.shape[2:], k.shape[2]):
            if is_decode_only:
                cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            own = q[:, 0]
            return _varlen_paged(own, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqlens_k, block_table, scores)[:, None]
        plan = _plan_of_step(block_table, cu_seqlens_q, seqlens_k, k.shape[1], is_decode_only, scores.window)
        return plan.attend(q[:, 0], k, v, scores.scale)[:, None]


def attention_for(device: torch.device, shape: ModelShape) -> type[SelfAttention]:
    """The attention class for a device: Megatron's with FlashAttention, else ours, which also has sliding windows."""
    if device.type == "cuda" and HAVE_FLASH_ATTENTION and shape.window is None and shape.query_scalar is None:
        return SelfAttention
    # Megatron asserts FlashAttention before it calls the method that we replace.
    attention_module.HAVE_FA3 = True
    return PagedSelfAttention


def page_tokens(device: torch.device, wanted: int) -> int:
    """The page size for a requested one: on GPUs rounded up to a multiple of FLASH_PAGE."""
    return wanted if device.type == "cpu" else -(-wanted // FLASH_PAGE) * FLASH_PAGE


def kernel_name(device: torch.device, dtype: torch.dtype, page: int, shape: ModelShape) -> str:
    """Name of the kernel in use, for the log."""
    if attention_for(device, shape) is SelfAttention:
        return "flash-attention"
    sizes = (shape.heads, shape.head_dim, shape.kv_heads)
    is_fused = device.type == "cuda" and dtype in FUSED_DTYPES and varlen_reads_pages(device, dtype, page, *sizes)
    return "torch varlen" if is_fused else "torch gather"


@cache
def varlen_reads_pages(device: torch.device, dtype: torch.dtype, page: int, heads: int, dim: int, kv_heads: int) -> bool:
    """Whether torch's kernel supports these pages. Tried once, because its limits differ between releases."""
    if not {"block_table", "seqused_k", "enable_gqa"} <= inspect.signature(varlen_kernel()).parameters.keys():
        return False
    query = torch.zeros(1, heads, dim, device=device, dtype=dtype)
    pool = torch.zeros(1, page, kv_heads, dim, device=device, dtype=dtype)
    one = torch.ones(1, dtype=torch.int32, device=device)
    bounds = torch.arange(2, dtype=torch.int32, device=device)
    try:
        _varlen_paged(query, pool, pool, bounds, 1, 1, one, torch.zeros(1, 1, dtype=torch.int32, device=device), Scores())
    except (RuntimeError, ValueError) as error:
        log.warning("torch's paged attention cannot be used; pages are gathered instead", reason=str(error).partition("\n")[0])
        return False
    return True


def _varlen_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_q: int,
    max_k: int,
    seqlens_k: Tensor,
    block_table: Tensor,
    scores: Scores,
) -> Tensor:
    out = varlen_kernel()(
        q,
        k,
        v,
        cu_seqlens_q,
        None,
        max_q,
        max_k,
        scale=scores.scale,
        window_size=scores.window_size,
        enable_gqa=True,
        seqused_k=seqlens_k,
        block_table=block_table.clamp(min=0),
    )
    assert isinstance(out, Tensor)
    return out


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that are computed together."""

    queries: Tensor
    """Rows of q, [requests, queries each]; shorter requests are padded with their first row."""
    keys: Tensor
    """Rows of the flattened pages, [requests, longest]."""
    mask: Tensor
    """[requests, 1, queries each (or 1), longest]"""
    is_real: Tensor | None
    """Which of `queries` are not padding; None: all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None) -> None:
        groups, dim = k.shape[-2:]
        requests, width = self.queries.shape
        # Query heads that share a key head become further queries, so that keys are not repeated.
        shared = q.shape[1] // groups
        own = q[self.queries].view(requests, width, groups, shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        keys, values = (_gathered(pool, self.keys) for pool in (k, v))
        mask = self.mask if width == 1 else self.mask.repeat_interleave(shared, dim=2)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
        attended = attended.view(requests, groups, width, shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        if self.is_real is None:
            out[self.queries] = attended
        else:
            out[self.queries[self.is_real]] = attended[self.is_real]


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A step in which all requests have one query, so that no gather of queries is needed."""

    keys: Tensor
    """Rows of the flattened pages, [requests, longest]."""
    mask: Tensor
    """[requests, 1, 1, longest]"""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        requests, heads, dim = q.shape
        groups = k.shape[-2]
        keys, values = (_gathered(pool, self.keys) for pool in (k, v))
        own = q.view(requests, groups, heads // groups, dim)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=self.mask, scale=scale)
        return attended.view(requests, heads, dim)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The batches of one engine step, computed once for all layers with the same window."""

    parts: tuple[_Part, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        out = torch.zeros_like(q)
        for part in self.parts:
            part.attend(q, k, v, out, scale)
        return out


def _gathered(pool: Tensor, rows: Tensor) -> Tensor:
    """[requests, heads, longest, dim]"""
    groups, dim = pool.shape[-2:]
    picked = pool.view(-1, groups * dim).index_select(0, rows.view(-1))
    return picked.view(*rows.shape, groups, dim).transpose(1, 2)


def _plan_of_step(
    block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, page: int, is_decode_only: bool, window: int | None
) -> _Plan | _Decoding:
    """Make the plan, or get it from the step's block table, a tensor object that only the layers of one step share."""
    plans: dict[int | None, _Plan | _Decoding] | None = getattr(block_table, "async_rl_plans", None)
    if plans is None:
        plans = block_table.async_rl_plans = {}  # pyright: ignore[reportAttributeAccessIssue]
    if window not in plans:
        if is_decode_only and bool((seqlens_k > 0).all()):
            plans[window] = _decoding(block_table, seqlens_k, page, window)
        else:
            plans[window] = _make_plan(block_table, cu_seqlens_q, seqlens_k, page, is_decode_only, window)
    return plans[window]


def _decoding(block_table: Tensor, seqlens_k: Tensor, page: int, window: int | None) -> _Decoding:
    position = torch.arange(int(seqlens_k.max()), device=block_table.device)
    keys = _rows(block_table, position, page)
    return _Decoding(keys=keys, mask=_seen(position, seqlens_k[:, None] - 1, window)[:, None, None])


def _seen(position: Tensor, last: Tensor, window: int | None) -> Tensor:
    """Whether a query whose own position is `last` attends to a position."""
    return position <= last if window is None else (position <= last) & (position > last - window)


def _rows(block_table: Tensor, position: Tensor, page: int) -> Tensor:
    """Row indexes of positions in the flattened pages."""
    pages = block_table[:, : -(-len(position) // page)].clamp(min=0).long()
    return pages[:, position // page] * page + position % page


def _make_plan(
    block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, page: int, is_decode_only: bool, window: int | None
) -> _Plan:
    lengths = seqlens_k.tolist()
    if is_decode_only:
        starts, counts = list(range(len(lengths))), [1] * len(lengths)
    else:
        bounds = cu_seqlens_q.tolist()
        starts, counts = bounds[:-1], [stop - start for start, stop in pairwise(bounds)]
    work = [
        (request, start, count, length)
        for request, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True))
        if count > 0 and length > 0
    ]
    decoding = [item for item in work if item[2] == 1]
    prompts = [item for item in work if item[2] > 1]
    batches = [decoding, *_batches_of_prompts(prompts)]
    return _Plan(tuple(_make_part(batch, block_table, page, window) for batch in batches if batch))


_Work = tuple[int, int, int, int]
"""request, first row of q, number of queries, number of keys"""


def _batches_of_prompts(prompts: list[_Work]) -> list[list[_Work]]:
    """Batch prompts of similar lengths, to limit padding."""
    batches: list[list[_Work]] = []
    for item in sorted(prompts, key=lambda item: item[3]):
        _, _, queries, keys = item
        if batches and (len(batches[-1]) + 1) * queries * keys <= MAX_PADDED_SCORES and keys <= 2 * batches[-1][0][3]:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _make_part(work: list[_Work], block_table: Tensor, page: int, window: int | None) -> _Part:
    device = block_table.device
    requests, first, queries, keys = torch.tensor(work, device=device).unbind(1)
    width, longest = int(max(item[2] for item in work)), int(max(item[3] for item in work))
    offset = torch.arange(width, device=device)
    is_real = offset < queries[:, None]
    rows = first[:, None] + torch.where(is_real, offset, 0)

    position = torch.arange(longest, device=device)
    # Query j of n, standing at position keys - n + j, sees the keys up to itself.
    last_seen = (keys - queries)[:, None] + torch.where(is_real, offset, 0)
    mask = _seen(position, last_seen[:, :, None], window)
    return _Part(
        queries=rows,
        keys=_rows(block_table[requests], position, page),
        mask=mask[:, None],
        is_real=None if bool(is_real.all()) else is_real,
    )
