"""The kernels between the product of queries, keys and values and attention, in Triton's interpreter: as JSON, how they differ
from torch's norm and `Rotation.turn`, and a model that has them and the norms' from one that has not.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron import parallel
from async_rl.megatron.attention import head_kernels
from async_rl.megatron.attention.head_kernels import HeadNorms, query_key_value
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.attention.self_attention import SelfAttentionOfLayer
from async_rl.megatron.layers.norms import Norm
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import ModelShape

GROUPS, EPS = 2, 1e-6
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=12, ffn=48, vocab_size=50, max_positions=64, rope_theta=1e4,
    qk_norm=True, init_std=0.2,
)  # fmt: skip


class ByKernels(SelfAttentionOfLayer):
    @staticmethod
    def uses_kernels(device: torch.device) -> bool:
        return True


def difference(tokens: int, batch: int, shared: int, dim: int, has_norms: bool, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    mixed = random(tokens, batch, GROUPS * (shared + 2) * dim)
    weights = [1 + random(dim) / 4 for _ in range(2)]
    angles = (3 * torch.randn(tokens, 1, 1, dim // 2, generator=generator)).repeat(1, 1, 1, 2)
    directions = [random(tokens, batch, heads, dim) for heads in (GROUPS * shared, GROUPS, GROUPS)]

    def by_torch(mixed: Tensor, weights: list[Tensor]) -> list[Tensor]:
        heads = mixed.view(tokens, batch, GROUPS, shared + 2, dim)
        parts = [heads[..., :shared, :].flatten(2, 3), heads[..., shared, :], heads[..., shared + 1, :]]
        for place in range(2):
            if has_norms:
                parts[place] = functional.rms_norm(parts[place], (dim,), weights[place], EPS)
            parts[place] = Rotation.by(angles, mixed.dtype).turn(parts[place])
        return parts

    def by_kernels(mixed: Tensor, weights: list[Tensor]) -> list[Tensor]:
        norms = HeadNorms(*weights, EPS) if has_norms else None
        return query_key_value(mixed, Rotation.by(angles, dtype), norms, groups=GROUPS, dim=dim)

    found = []
    for compute, wanted_dtype in ((by_kernels, dtype), (by_torch, torch.float64)):
        own = [each.detach().to(wanted_dtype, copy=True).requires_grad_() for each in (mixed, *weights)]
        parts = compute(own[0], own[1:])
        torch.stack([(part * direction).sum() for part, direction in zip(parts, directions, strict=True)]).sum().backward()
        found.append([*parts, own[0].grad, *(each.grad for each in own[1:] if has_norms)])
    return max(_distance(one, other) for one, other in zip(*found, strict=True))


def of_a_model(shape: ModelShape) -> float:
    """Largest difference of logits and gradients between models with and without kernels."""
    found: list[list[Tensor]] = []
    for attention in (ByKernels, SelfAttentionOfLayer):
        Norm.uses_kernels = staticmethod(lambda _, by_kernels=attention is ByKernels: by_kernels)
        model = build_model(shape, device=torch.device("cpu"), dtype=torch.float32, seed=1, attention=attention)
        logits = forward_packed(model, *pack([torch.arange(9), torch.arange(4)])).logits()
        logits.square().mean().backward()
        found.append([logits, *(each.grad for each in model.parameters() if each.grad is not None)])
    return max(_distance(one, other) for one, other in zip(*found, strict=True))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    assert one is not None
    assert other is not None
    assert one.shape == other.shape
    return ((one - other).norm() / other.norm().clamp(min=1e-12)).item() if one.numel() else 0.0


if __name__ == "__main__":
    head_kernels.MOST_PROGRAMS = 3  # so that a program has several tiles
    cases = {
        "Qwen3": (40, 1, 2, 16, True),
        "no norms": (7, 1, 3, 8, False),
        "odd width": (9, 1, 1, 12, True),
        "a batch": (5, 3, 2, 8, True),
        "empty": (0, 1, 2, 8, True),
    }
    numbers = {
        f"{name} {dtype}": difference(*case, dtype) for name, case in cases.items() for dtype in (torch.float32, torch.bfloat16)
    }
    parallel.initialize(device=torch.device("cpu"))
    shapes = {
        "norms": SHAPE,
        "plain": replace(SHAPE, qk_norm=False),
        "over projections": replace(SHAPE, qk_norm_over="projection"),
        "centered": replace(SHAPE, centered_norms=True),
    }
    print(json.dumps({"kernels": numbers, "models": {name: of_a_model(shape) for name, shape in shapes.items()}}))
