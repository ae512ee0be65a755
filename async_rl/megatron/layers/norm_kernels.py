"""RMSNorm as Triton kernels: its backward pass, for which torch's reads everything twice, and with the sum that it norms."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

TILE = 4096
"""Numbers that a program handles at once, if they are of several rows."""
MOST_PROGRAMS = 1024
"""Each keeps its own sum of the weight's gradient."""


class RmsNorm(torch.autograd.Function):
    """Norm of the last dimension, all of which a program holds."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.eps = eps
        return functional.rms_norm(given, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        given, weight = ctx.saved_tensors
        given, gradient = given.contiguous(), gradients[0].contiguous()
        out, width = torch.empty_like(given), len(weight)
        rows, block = given.numel() // width, 1 << (width - 1).bit_length()
        tile = max(1, TILE // block)
        programs = min(-(-rows // tile), MOST_PROGRAMS)
        of_weight = weight.new_empty((programs, width), dtype=torch.float32)
        if rows:
            _norm_backward[(programs,)](
                given, weight, gradient, out, of_weight, rows, ctx.eps, WIDTH=width, BLOCK=block, ROWS=tile, num_warps=8
            )
        return out, of_weight.sum(dim=0).to(weight.dtype), None


def add_and_norm(given: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its norm over the last dimension. Not differentiable; rounded where torch rounds."""
    given, residual = given.contiguous(), residual.contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    width = len(weight)
    if rows := residual.numel() // width:
        _add_and_norm[(rows,)](
            given, residual, weight, total, normed, eps, WIDTH=width, BLOCK=1 << (width - 1).bit_length(), num_warps=4
        )
    return total, normed


@triton.jit
def _add_and_norm(given, residual, weight, total, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    dtype = total.dtype.element_ty
    x = tl.load(given + at, mask=is_column, other=0.0).to(tl.float32)
    x += tl.load(residual + at, mask=is_column, other=0.0).to(tl.float32)
    x = x.to(dtype)
    tl.store(total + at, x, mask=is_column)
    x = x.to(tl.float32)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(normed + at, (x * scale * w).to(dtype), mask=is_column)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    given, weight, gradient, out, of_weight, rows, eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first_row in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        is_there = (row < rows)[:, None] & is_column[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        x = tl.load(given + at, mask=is_there, other=0.0).to(tl.float32)
        above = tl.load(gradient + at, mask=is_there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x *= scale
        total += above * x
        above *= w
        along = tl.sum(above * x, 1)[:, None] / WIDTH
        tl.store(out + at, ((above - x * along) * scale).to(out.dtype.element_ty), mask=is_there)
    tl.store(of_weight + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), mask=is_column)
