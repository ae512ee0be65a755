"""Weights to send: shaped like a transformer's, or many small tensors, which are the worst case for sending one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from async_rl.transport.digest import specs_of
from async_rl.transport.plan import Box

Weights = dict[str, torch.Tensor]


def transformer(mib: int) -> Weights:
    """Nearly all bytes in matrices, nearly all names on vectors; bfloat16, layers of 16 MiB."""
    hidden, layers = 1024, max(1, mib // 16)
    per_layer = mib * (1 << 19) // layers // hidden  # rows of `hidden` numbers
    shares = {"attention.qkv": 3, "attention.projection": 2, "mlp.fc1": 7, "mlp.fc2": 4}
    weights: Weights = {}
    for layer in range(layers):
        for name, share in shares.items():
            weights[f"layers.{layer}.{name}"] = torch.randn(per_layer * share // 16, hidden).bfloat16()
        for name in ("norm", "q_norm", "k_norm", "mlp.norm"):
            weights[f"layers.{layer}.{name}"] = torch.randn(hidden).bfloat16()
    return weights


def scattered(tensors: int = 512, kib: int = 16) -> Weights:
    return {f"{number}": torch.randn(kib << 8) for number in range(tensors)}


def held(weights: Mapping[str, torch.Tensor]) -> dict[Box, torch.Tensor]:
    """As a learner of one rank holds them."""
    return {Box.whole(spec): weights[spec.name] for spec in specs_of(weights)}


def num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
