"""The SwiGLU kernels beside torch, in Triton's interpreter: prints the largest differences as JSON."""

from __future__ import annotations

import json

import torch
from torch.nn import functional

from async_rl.megatron.layers.swiglu_kernels import Swiglu


def difference(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(7)
    given = (3 * torch.randn(shape, generator=generator)).to(dtype)
    own, expected = given.clone().requires_grad_(), given.double().requires_grad_()
    left, right = expected.chunk(2, dim=-1)
    direction = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    out, wanted = Swiglu.apply(own), functional.silu(left) * right
    (out * direction).sum().backward()
    (wanted * direction).sum().backward()
    assert out.dtype is dtype
    pairs = [(out, wanted), (own.grad, expected.grad)]
    return max(((one - other).abs() / other.abs().clamp(min=1)).max().item() if one.numel() else 0.0 for one, other in pairs)


if __name__ == "__main__":
    shapes = {"wide": (3, 1, 2 * 1500), "narrow": (5, 8), "empty": (0, 16)}
    cases = [(name, dtype) for name in shapes for dtype in (torch.float32, torch.bfloat16)]
    print(json.dumps({f"{name} {dtype}": difference(shapes[name], dtype) for name, dtype in cases}))
