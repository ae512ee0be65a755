"""SwiGLU as two Triton kernels: what the backward pass needs is the input alone, and each pass reads and writes once.

Megatron's own fusion uses torch's compiler, which compiles again for new numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

BLOCK = 1024


class Swiglu(torch.autograd.Function):
    """silu(left half) * right half, of the last dimension. Computed in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        given = given.contiguous()
        width = given.shape[-1] // 2
        out = given.new_empty(*given.shape[:-1], width)
        if out.numel():
            _swiglu_forward[_grid(out, width)](given, out, width, BLOCK=BLOCK)
        ctx.save_for_backward(given)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (given,), (gradient,) = ctx.saved_tensors, gradients
        out = torch.empty_like(given)
        width = given.shape[-1] // 2
        if out.numel():
            _swiglu_backward[_grid(gradient, width)](given, gradient.contiguous(), out, width, BLOCK=BLOCK)
        return out


def _grid(halves: Tensor, width: int) -> tuple[int, ...]:
    return halves.numel() // width, -(-width // BLOCK)


@triton.jit
def _swiglu_forward(given, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate = tl.load(given + row * 2 * width + column, mask=there, other=0.0).to(tl.float32)
    value = tl.load(given + row * 2 * width + width + column, mask=there, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * value
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=there)


@triton.jit
def _swiglu_backward(given, gradient, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate = tl.load(given + row * 2 * width + column, mask=there, other=0.0).to(tl.float32)
    value = tl.load(given + row * 2 * width + width + column, mask=there, other=0.0).to(tl.float32)
    above = tl.load(gradient + row * width + column, mask=there, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    of_gate = above * value * share * (1 + gate * (1 - share))
    tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=there)
    tl.store(out + row * 2 * width + width + column, (above * gate * share).to(out.dtype.element_ty), mask=there)
