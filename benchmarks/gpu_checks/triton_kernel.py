"""The smallest kernel of Triton's, which must be a function of a file."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(given, made, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(made + place, 2 * tl.load(given + place, mask=place < count), mask=place < count)


def doubled(given: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(given)
    _double[(triton.cdiv(given.numel(), 256),)](given, made, given.numel(), BLOCK=256)
    return made
