"""From the product of a layer's queries, keys and values to heads, as two Triton kernels: norm of each head, then rotation.

    [token, group, (query heads of the group, key, value)]  ──▶  queries, keys         values stay where they are
                                                            ◀──  one gradient of the same layout

Each pass reads and writes once. In half precision, the numbers of the forward pass are rounded where torch's norm and then
`rotary.Rotation` round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from async_rl.megatron.attention.rotary import Rotation

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

TILE = 1024
"""Halves of heads that a program handles at once, in numbers."""
MOST_PROGRAMS = 2048
"""Programs of a backward pass, each of which keeps its own sum of the gradients of the norms' weights."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query head and each key head."""

    query: Tensor
    """[dim]"""
    key: Tensor
    eps: float


def query_key_value(mixed: Tensor, rotation: Rotation, norms: HeadNorms | None, *, groups: int, dim: int) -> list[Tensor]:
    """Queries, keys and values [tokens, batch, heads, dim] of `mixed` [tokens, batch, width]. Differentiable."""
    query, key = (norms.query, norms.key) if norms is not None else (None, None)
    sizes = groups, mixed.shape[-1] // (groups * dim) - 2, dim
    made: Any = _Heads.apply(mixed.contiguous(), query, key, rotation, norms.eps if norms is not None else 0.0, sizes)
    return [*made]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        rotation: Rotation,
        eps: float,
        sizes: tuple[int, int, int],
    ) -> tuple[Tensor, ...]:
        groups, shared, dim = sizes
        tokens, batch, _ = mixed.shape
        query, key = mixed.new_empty(tokens, batch, groups * shared, dim), mixed.new_empty(tokens, batch, groups, dim)
        rows = tokens * batch * groups * (shared + 1)
        if rows:
            _heads_forward[lambda sizes: (-(-rows // sizes["ROWS"]),)](
                mixed, query, key, rotation.cos, rotation.sin, _or(query_weight, mixed), _or(key_weight, mixed), rows, eps,
                batch, **_constants(sizes, query_weight),
            )  # fmt: skip
        # without norms the product is not needed again
        kept = mixed if query_weight is not None else None
        ctx.save_for_backward(kept, query_weight, key_weight, rotation.cos, rotation.sin)
        ctx.eps, ctx.sizes, ctx.shape = eps, sizes, mixed.shape
        return query, key, mixed.view(tokens, batch, groups, shared + 2, dim)[..., -1, :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        groups, shared, dim = ctx.sizes
        of_query, of_key, of_value = (each.contiguous() for each in gradients)
        of_mixed = of_query.new_empty(ctx.shape)
        tokens, batch, _ = ctx.shape
        rows = tokens * batch * groups * (shared + 2)
        constants = _constants(ctx.sizes, query_weight)
        programs = min(-(-rows // constants["ROWS"]), MOST_PROGRAMS)
        of_weights = cos.new_empty((programs, 2, dim) if query_weight is not None else (0,), dtype=torch.float32)
        if rows:
            _heads_backward[(programs,)](
                _or(mixed, cos), of_query, of_key, of_value, of_mixed, cos, sin, _or(query_weight, cos), _or(key_weight, cos),
                of_weights, rows, ctx.eps, batch, **constants,
            )  # fmt: skip
        if query_weight is None:
            return of_mixed, None, None, None, None, None
        summed = of_weights.sum(dim=0)
        return of_mixed, summed[0].to(query_weight.dtype), summed[1].to(key_weight.dtype), None, None, None


def _or(given: Tensor | None, filler: Tensor) -> Tensor:
    """Return what a kernel takes in place of a tensor that it does not read."""
    return given if given is not None else filler


def _constants(sizes: tuple[int, int, int], weight: Tensor | None) -> dict[str, Any]:
    groups, shared, dim = sizes
    half = dim // 2
    wide = 1 << (half - 1).bit_length()
    return {
        "GROUPS": groups,
        "SHARED": shared,
        "HALF": half,
        "WIDE": wide,
        "HAS_NORM": weight is not None,
        "ROWS": max(1, TILE // wide),
        "num_warps": 4,
    }


@triton.jit(do_not_specialize=["rows", "batch"])
def _heads_forward(
    mixed, query, key, cos, sin, query_weight, key_weight, rows, eps, batch,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A row is a query head or a key head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDE)
    is_there = (row < rows)[:, None] & (lane < HALF)[None, :]
    token, head = row // (GROUPS * (SHARED + 1)), row % (GROUPS * (SHARED + 1))
    group, place = head // (SHARED + 1), head % (SHARED + 1)
    is_key = place == SHARED
    dtype = query.dtype.element_ty

    at = ((token * GROUPS + group) * (SHARED + 2) + place)[:, None] * (2 * HALF) + lane[None, :]
    first, second = _halves(mixed, at, is_there, HALF)
    if HAS_NORM:
        scale = _scale(first, second, eps, HALF)
        first = (first * scale * _weight_of(is_key, query_weight, key_weight, lane, HALF, 0)).to(dtype).to(tl.float32)
        second = (second * scale * _weight_of(is_key, query_weight, key_weight, lane, HALF, HALF)).to(dtype).to(tl.float32)
    c, s = _angle(cos, sin, token // batch, lane, is_there, HALF)
    turned_first = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    turned_second = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)

    to = _place_of(token, group, place, lane, GROUPS, SHARED, HALF)
    is_query_there, is_key_there = is_there & ~is_key[:, None], is_there & is_key[:, None]
    tl.store(query + to, turned_first.to(dtype), mask=is_query_there)
    tl.store(query + to + HALF, turned_second.to(dtype), mask=is_query_there)
    to = _place_of_group(token, group, lane, GROUPS, HALF)
    tl.store(key + to, turned_first.to(dtype), mask=is_key_there)
    tl.store(key + to + HALF, turned_second.to(dtype), mask=is_key_there)


@triton.jit(do_not_specialize=["rows", "batch"])
def _heads_backward(
    mixed, of_query, of_key, of_value, of_mixed, cos, sin, query_weight, key_weight, of_weights, rows, eps, batch,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token, of values too. In float32, rounded once."""
    lane = tl.arange(0, WIDE)
    query_sum_first, query_sum_second = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    key_sum_first, key_sum_second = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for first_row in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        is_there = (row < rows)[:, None] & (lane < HALF)[None, :]
        token, head = row // (GROUPS * (SHARED + 2)), row % (GROUPS * (SHARED + 2))
        group, place = head // (SHARED + 2), head % (SHARED + 2)
        is_query, is_key, is_value = (place < SHARED)[:, None], (place == SHARED)[:, None], (place > SHARED)[:, None]

        at = _place_of(token, group, place, lane, GROUPS, SHARED, HALF)
        first, second = _halves(of_query, at, is_there & is_query, HALF)
        at = _place_of_group(token, group, lane, GROUPS, HALF)
        key_first, key_second = _halves(of_key, at, is_there & is_key, HALF)
        first += key_first
        second += key_second
        c, s = _angle(cos, sin, token // batch, lane, is_there, HALF)
        back_first, back_second = first * c + second * s, second * c - first * s

        to = row[:, None] * (2 * HALF) + lane[None, :]
        if HAS_NORM:
            x_first, x_second = _halves(mixed, to, is_there & ~is_value, HALF)
            scale = _scale(x_first, x_second, eps, HALF)
            x_first *= scale
            x_second *= scale
            query_sum_first += tl.where(is_query, back_first * x_first, 0.0)
            query_sum_second += tl.where(is_query, back_second * x_second, 0.0)
            key_sum_first += tl.where(is_key, back_first * x_first, 0.0)
            key_sum_second += tl.where(is_key, back_second * x_second, 0.0)
            back_first *= _weight_of(place == SHARED, query_weight, key_weight, lane, HALF, 0)
            back_second *= _weight_of(place == SHARED, query_weight, key_weight, lane, HALF, HALF)
            along = (tl.sum(back_first * x_first, 1) + tl.sum(back_second * x_second, 1))[:, None] / (2 * HALF)
            back_first = (back_first - x_first * along) * scale
            back_second = (back_second - x_second * along) * scale
        value_first, value_second = _halves(of_value, at, is_there & is_value, HALF)
        back_first += value_first
        back_second += value_second
        tl.store(of_mixed + to, back_first.to(of_mixed.dtype.element_ty), mask=is_there)
        tl.store(of_mixed + to + HALF, back_second.to(of_mixed.dtype.element_ty), mask=is_there)
    if HAS_NORM:
        of_weights += tl.program_id(0) * 4 * HALF + lane
        is_lane = lane < HALF
        tl.store(of_weights, tl.sum(query_sum_first, 0), mask=is_lane)
        tl.store(of_weights + HALF, tl.sum(query_sum_second, 0), mask=is_lane)
        tl.store(of_weights + 2 * HALF, tl.sum(key_sum_first, 0), mask=is_lane)
        tl.store(of_weights + 3 * HALF, tl.sum(key_sum_second, 0), mask=is_lane)


@triton.jit
def _halves(heads, at, is_there, HALF: tl.constexpr):
    """Both halves of rows whose first halves are at `at`, in float32; 0 where nothing is."""
    first = tl.load(heads + at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=is_there, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _scale(first, second, eps, HALF: tl.constexpr):
    """What a norm multiplies each row by, before its weights."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]


@triton.jit
def _angle(cos, sin, position, lane, is_there, HALF: tl.constexpr):
    """Cosine and sine of each row, from their second halves, where the sine has its own sign."""
    at = position[:, None] * (2 * HALF) + HALF + lane[None, :]
    c = tl.load(cos + at, mask=is_there, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=is_there, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _weight_of(is_key, query_weight, key_weight, lane, HALF: tl.constexpr, OFFSET: tl.constexpr):
    """The norm's weights of one half of each row, [rows, half]."""
    of_query = tl.load(query_weight + OFFSET + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + OFFSET + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    return tl.where(is_key[:, None], of_key[None, :], of_query[None, :])


@triton.jit
def _place_of(token, group, place, lane, GROUPS: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr):
    """Offsets of query heads' first halves."""
    return ((token * GROUPS + group) * SHARED + place)[:, None] * (2 * HALF) + lane[None, :]


@triton.jit
def _place_of_group(token, group, lane, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Offsets of key or value heads' first halves."""
    return (token * GROUPS + group)[:, None] * (2 * HALF) + lane[None, :]
