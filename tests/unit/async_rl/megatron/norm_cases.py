"""The kernels of RMSNorm beside torch, in Triton's interpreter: prints the largest differences as JSON."""

from __future__ import annotations

import json

import torch
from torch.nn import functional

from async_rl.megatron.layers import norm_kernels
from async_rl.megatron.layers.norm_kernels import RmsNorm

EPS = 1e-6


def difference(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(7)
    given, direction = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(shape[-1:], generator=generator) / 4).to(dtype)
    own = [each.clone().requires_grad_() for each in (given, weight)]
    expected = [each.double().requires_grad_() for each in (given, weight)]
    (RmsNorm.apply(*own, EPS) * direction).sum().backward()
    (functional.rms_norm(expected[0], shape[-1:], expected[1], EPS) * direction).sum().backward()
    return max(
        ((one.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-12)).item()
        for one, other in zip(own, expected, strict=True)
    )


def difference_of_sum(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The interpreter rounds to bfloat16 towards 0, unlike a GPU."""
    generator = torch.Generator().manual_seed(7)
    given, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(shape[-1:], generator=generator) / 4).to(dtype)
    found = norm_kernels.add_and_norm(given, residual, weight, EPS)
    total = given.double() + residual.double()
    expected = total, functional.rms_norm(total, shape[-1:], weight.double(), EPS)
    return max(
        ((one - other).norm() / other.norm().clamp(min=1e-12)).item() for one, other in zip(found, expected, strict=True)
    )


if __name__ == "__main__":
    norm_kernels.MOST_PROGRAMS = 2  # so that a program has several tiles
    norm_kernels.TILE = 256
    shapes = {"narrow": (3, 7, 24), "tiles": (40, 64), "wide": (5, 1, 700), "empty": (0, 16)}
    cases = [(name, dtype) for name in shapes for dtype in (torch.float32, torch.bfloat16)]
    of_gradients = {f"{name} {dtype}": difference(shapes[name], dtype) for name, dtype in cases}
    of_sums = {f"sum, {name} {dtype}": difference_of_sum(shapes[name], dtype) for name, dtype in cases}
    print(json.dumps(of_gradients | of_sums))
