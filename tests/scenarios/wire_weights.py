"""Small sets of weights that have every kind of tensor a model may have."""

from __future__ import annotations

import torch

from async_rl.transport.digest import digest_of
from async_rl.types import VersionRecord


def weights(seed: int, rows: int = 4000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(rows, 1000, generator=generator),
        "layers.0.norm": torch.randn(64, generator=generator),
        "layers.0.bias": torch.randn(7, 5, generator=generator).bfloat16(),
        "layers.0.tied": torch.randn(300, 300, generator=generator).t(),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.empty(0, 8),
        "steps": torch.randint(1 << 40, (3,), generator=generator),
    }


def record_of(version: int, tensors: dict[str, torch.Tensor], timeline: str = "a") -> VersionRecord:
    return VersionRecord(version=version, timeline=timeline, step=version, digest=digest_of(tensors))
