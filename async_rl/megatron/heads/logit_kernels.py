"""What a head computes from logits as two Triton kernels: each reads them once, where torch's operators do many times.

d logprob / d z_j = (j is the target) - p_j          d entropy / d z_j = -p_j (log p_j + entropy)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

BLOCK = 4096
"""Entries that a program handles at once."""
FLOOR = tl.constexpr(-1e36)
"""Below all logits, also those that are impossible, and finite when multiplied with a number of entries."""


def row_scores(logits: Tensor, targets: Tensor, *, with_entropies: bool) -> list[Tensor]:
    """Return of logits [tokens, entries] in float32: the targets' log-probabilities, entropies if wanted, log-sum-exps."""
    assert logits.stride(1) == 1
    logprobs, lse, entropies = (logits.new_empty(len(logits)) for _ in range(3))
    if len(logits):
        _read[(len(logits),)](
            logits, logits.stride(0), logits.shape[1], targets.contiguous(), logprobs, lse, entropies,
            WITH_ENTROPIES=with_entropies, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return [logprobs, entropies, lse] if with_entropies else [logprobs, lse]


def slopes(
    logits: Tensor,
    targets: Tensor,
    shift: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    *,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of logits, times `factor`, from those of the targets' log-probabilities and of entropies.

    `shift`: what makes log-probabilities of a token's logits when added. `targets` outside of the entries are elsewhere.
    """
    assert logits.stride(1) == 1
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    given = [each.contiguous() if each is not None else shift for each in (shift, entropies, of_logprobs, of_entropies)]
    if out.numel():
        _slope[(len(logits), -(-logits.shape[1] // BLOCK))](
            logits, logits.stride(0), logits.shape[1], targets.contiguous(), *given, out, factor,
            OF_LOGPROBS=of_logprobs is not None, OF_ENTROPIES=of_entropies is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _read(
    logits, row_stride, entries, targets, logprobs, lse, entropies,
    WITH_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Every lane keeps its largest logit; of the logits less that, the sum of exponentials, and of their products
    with them. Numbers are finite throughout, so that an impossible logit, whose exponential is 0, adds 0.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * row_stride
    largest = tl.full([BLOCK], FLOOR, tl.float32)
    total, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, entries, BLOCK):
        there = start + lane < entries
        logit = tl.load(logits + start + lane, mask=there, other=FLOOR)
        apart = logit - largest
        less = tl.where(there, tl.exp(-tl.abs(apart)), 0.0)
        if WITH_ENTROPIES:
            products = tl.where(apart > 0, less * (products - total * apart), products + less * apart)
        total = tl.where(apart > 0, total * less + 1, total + less)
        largest = tl.maximum(largest, logit)

    top = tl.max(largest, 0)
    apart = largest - top
    of_lane = tl.exp(apart)
    whole = tl.sum(total * of_lane, 0)
    log_whole = tl.log(whole)
    target = tl.load(logits + tl.load(targets + row))
    tl.store(logprobs + row, target - top - log_whole)
    tl.store(lse + row, top + log_whole)
    if WITH_ENTROPIES:
        tl.store(entropies + row, log_whole - tl.sum(of_lane * (products + total * apart), 0) / whole)


@triton.jit
def _slope(
    logits, row_stride, entries, targets, shifts, entropies, of_logprobs, of_entropies, out, factor,
    OF_LOGPROBS: tl.constexpr,
    OF_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = entry < entries
    log_p = tl.load(logits + row * row_stride + entry, mask=there, other=FLOOR) + tl.load(shifts + row)
    p = tl.exp(log_p)
    slope = tl.zeros([BLOCK], tl.float32)
    if OF_LOGPROBS:
        slope += tl.load(of_logprobs + row) * (tl.where(entry == tl.load(targets + row), 1.0, 0.0) - p)
    if OF_ENTROPIES:
        slope -= tl.load(of_entropies + row) * (p * (log_p + tl.load(entropies + row)))
    tl.store(out + row * entries + entry, (slope * factor).to(out.dtype.element_ty), mask=there)
