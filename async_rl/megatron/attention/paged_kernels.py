"""Attention over the pages of a KV cache as Triton kernels. Start with `paged_attention`.

A tile holds some query tokens of a request, times the query heads that share one KV head: they all read the same keys.

    decoding    one query token; the keys are divided into splits that run side by side, and another kernel merges them
    prompts     several query tokens, no splits
    a step      may have both; each kernel leaves the requests of the other alone

No launch depends on values on the device, so the host waits for nothing, and a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

MIN_ROWS = 16
"""Rows of the smallest matrix instruction."""
SHORTEST_SPLIT, LONGEST_SPLIT, MOST_SPLITS = 256, 8192, 64
"""Keys per split, and splits per request."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program: queries times heads, keys per iteration, warps, and iterations whose loads are under way at once."""

    rows: int
    block: int
    warps: int
    stages: int

    @classmethod
    def of_prompts(cls, dim: int, itemsize: int) -> Tile:
        """For heads of `dim` numbers. As large as the registers of an A100 or H100 allow (tests compile for both)."""
        if itemsize == 2:
            return cls(rows=128, block=64, warps=8, stages=3) if dim <= 128 else cls(rows=64, block=32, warps=8, stages=2)
        return cls(rows=32, block=32, warps=8, stages=2) if dim <= 128 else cls(rows=16, block=16, warps=8, stages=2)

    @classmethod
    def of_decoding(cls, heads: int, dim: int, itemsize: int) -> Tile:
        """For so many query heads per KV head, and heads of `dim` numbers."""
        rows, width = max(MIN_ROWS, _power_of_2(heads)), dim * itemsize
        if width <= 256:
            return cls(rows, block=64, warps=4, stages=3)
        return cls(rows, block=32, warps=4, stages=2) if width <= 512 else cls(rows, block=16, warps=8, stages=2)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    *,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
    is_decode_only: bool,
    splits: int | None = None,
) -> Tensor:
    """Causal attention of `q` [tokens, heads, dim] to `k` and `v` [pages, page, kv heads, dim]; returns like `q`.

    Request r has `lengths[r]` keys, at most `longest`, in the pages `block_table[r]`. Its queries, the last of these tokens,
    are the rows `starts[r]` to `starts[r + 1]` of `q`; decode only, the one row r, and without keys zeros are returned for it.
    """
    tokens, heads, dim = q.shape
    kv_heads, requests = k.shape[2], len(lengths)
    shared = heads // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seen = longest if window is None else min(longest, window)
    if splits is None:
        splits = number_of_splits(requests * kv_heads, seen, _processors(q.device))
    sizes = {
        "SHARED": shared,
        "DIM": dim,
        "WIDE": max(MIN_ROWS, _power_of_2(dim)),
        "PAGE": k.shape[1],
        "WINDOW": window if window is not None else 0,
        # One product in the tensor cores' float32 would have 10 bits of mantissa.
        "PRECISION": "tf32x3" if q.dtype is torch.float32 else "tf32",
    }
    scale_log2 = (scale if scale is not None else dim**-0.5) * math.log2(math.e)
    given = (q, k, v, block_table, lengths, starts)
    strides = (*q.stride()[:2], *k.stride()[:3], block_table.stride(0))

    search = requests.bit_length()
    tile = Tile.of_decoding(shared, dim, q.element_size())
    parts = q.new_empty((requests, heads, splits, dim), dtype=torch.float32) if splits > 1 else out
    weights = q.new_empty((requests, heads, splits), dtype=torch.float32) if splits > 1 else out
    _attend[(kv_heads, requests, splits)](
        *given, parts, weights, scale_log2, *strides, requests, search,
        **sizes, ROWS=tile.rows, QUERIES=1, BLOCK=tile.block, SPLITS=splits, IS_DECODE_ONLY=is_decode_only,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(requests, heads)](
            parts, weights, starts, out, HEADS=heads, DIM=dim, WIDE=sizes["WIDE"], SPLITS=splits, IS_DECODE_ONLY=is_decode_only
        )
    if not is_decode_only:
        tile = Tile.of_prompts(dim, q.element_size())
        heads_of_tile = _power_of_2(shared)
        queries = max(2, tile.rows // heads_of_tile)
        _attend[(kv_heads, tokens // queries + requests, 1)](
            *given, out, out, scale_log2, *strides, requests, search,
            **sizes, ROWS=max(MIN_ROWS, queries * heads_of_tile), QUERIES=queries, BLOCK=tile.block, SPLITS=1,
            IS_DECODE_ONLY=False, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def number_of_splits(programs: int, longest: int, processors: int) -> int:
    """Splits of each request's keys: two programs per processor, and no split much shorter or longer than is worth it.

    A power of 2, because every number is compiled by itself.
    """
    wanted = max(-(-2 * processors // programs), -(-longest // LONGEST_SPLIT))
    return _power_of_2(max(1, min(wanted, longest // SHORTEST_SPLIT, MOST_SPLITS)))


def _power_of_2(number: int) -> int:
    """The smallest that is not below a number."""
    return 1 << (number - 1).bit_length()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["requests", "search"])  # they change from step to step
def _attend(
    queries, keys, values, table, lengths, starts, out, weights, scale_log2,
    query_token, query_head, pool_page, pool_token, pool_head, table_row, requests, search,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_DECODE_ONLY: tl.constexpr,
):  # fmt: skip
    """Programs: KV heads x tiles x splits, so that those that read one page run together. With splits, `out` gets means and
    `weights` base-2 logarithms of their weights.
    """
    kv_head, split = tl.program_id(0), tl.program_id(2)
    request, first = tl.program_id(1), 0
    if QUERIES > 1:
        # The tiles of request r begin at starts[r] // QUERIES + r, which leaves room for all: find the last that begins here
        # or earlier.
        tile, low, high = request, 0, requests
        for _ in range(search):
            middle = (low + high) // 2
            is_here = tl.load(starts + middle) // QUERIES + middle <= tile
            low = tl.where(is_here, middle, low)
            high = tl.where(is_here, high, middle)
        request = low
        first = (tile - (tl.load(starts + request) // QUERIES + request)) * QUERIES
    start, count = request, 1
    if not IS_DECODE_ONLY:
        start = tl.load(starts + request)
        count = tl.load(starts + request + 1) - start
        if (count == 1) != (QUERIES == 1):
            return
        if first >= count:
            return
    length = tl.load(lengths + request)

    row = tl.arange(0, ROWS)
    HEADS: tl.constexpr = ROWS // QUERIES
    query, head = first + row // HEADS, row % HEADS
    is_row = (query < count) & (head < SHARED)
    position = length - count + query
    head += kv_head * SHARED
    lane = tl.arange(0, WIDE)
    is_lane = lane < DIM
    at = (start + query).to(tl.int64) * query_token + head * query_head
    q = tl.load(queries + at[:, None] + lane[None, :], mask=is_row[:, None] & is_lane[None, :], other=0.0)

    stop = tl.minimum(length - count + first + QUERIES, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - count + first - WINDOW + 1, 0) // BLOCK * BLOCK
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(stop - begin, SPLITS), BLOCK) * BLOCK
        begin += split * share
        stop = tl.minimum(begin + share, stop)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDE], tl.float32)
    for first_key in range(begin, stop, BLOCK):
        key = first_key + tl.arange(0, BLOCK)
        is_key = key < stop
        if PAGE % BLOCK == 0:
            page = tl.load(table + request.to(tl.int64) * table_row + first_key // PAGE).to(tl.int64)
        else:
            page = tl.load(table + request.to(tl.int64) * table_row + key // PAGE, mask=is_key, other=0).to(tl.int64)
        place = page * pool_page + key % PAGE * pool_token + kv_head * pool_head
        k = tl.load(keys + place[None, :] + lane[:, None], mask=is_key[None, :] & is_lane[:, None], other=0.0)
        v = tl.load(values + place[:, None] + lane[None, :], mask=is_key[:, None] & is_lane[None, :], other=0.0)
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, tl.dot(q, k, input_precision=PRECISION) * scale_log2, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        share_of_key = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(share_of_key, 1)
        mean = mean * shrink[:, None] + tl.dot(share_of_key.to(v.dtype), v, input_precision=PRECISION)
        largest = larger
    mean /= tl.where(total > 0, total, 1.0)[:, None]

    if SPLITS == 1:
        at = (start + query).to(tl.int64) * (tl.num_programs(0) * SHARED) + head
    else:
        at = (request.to(tl.int64) * (tl.num_programs(0) * SHARED) + head) * SPLITS + split
        tl.store(
            weights + at, tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf")), mask=is_row
        )
    tl.store(out + at[:, None] * DIM + lane[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None] & is_lane[None, :])


@triton.jit
def _merge(
    parts, weights, starts, out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_DECODE_ONLY: tl.constexpr,
):  # fmt: skip
    """Merge the splits of requests with one query. Programs: requests x heads."""
    request, head = tl.program_id(0), tl.program_id(1)
    token = request
    if not IS_DECODE_ONLY:
        token = tl.load(starts + request)
        if tl.load(starts + request + 1) - token != 1:
            return
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    at = (request.to(tl.int64) * HEADS + head) * SPLITS + split
    weight = tl.load(weights + at)
    largest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(largest == -float("inf"), 0.0, largest))
    part = tl.load(parts + at[:, None] * DIM + lane[None, :], mask=(lane < DIM)[None, :], other=0.0)
    total = tl.sum(share, 0)
    mean = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + lane, mean.to(out.dtype.element_ty), mask=lane < DIM)
