"""Checks of the model that learner and engine share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from async_rl.megatron import parallel
from async_rl.megatron.model import build_model, forward_packed, pack
from gpu_checks.report import SMALL, Checks, Machine, Report

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Tolerance for logits and gradients, relative to the largest. bfloat16 has 8 bits, and both computations round differently."""


def packing(machine: Machine, report: Report) -> None:
    """A packed row must give the logits and gradients of its single sequences."""
    parallel.initialize(device=machine.device)
    for dtype, tolerance in TOLERANCES.items():
        name = str(dtype).removeprefix("torch.")
        generator = torch.Generator().manual_seed(2)
        rows = [
            torch.randint(0, SMALL.vocab_size, (length,), generator=generator).to(machine.device)
            for length in (64, 1, 2, 30, 300)
        ]
        packed, separate = (build_model(SMALL, device=machine.device, dtype=dtype, seed=1) for _ in range(2))
        together = forward_packed(packed, *pack(rows)).logits()
        places = [torch.arange(len(row), device=machine.device)[None] for row in rows]
        alone = torch.cat([separate(row[None], place, None)[0] for row, place in zip(rows, places, strict=True)])
        report.at_most(f"logits_{name}", _distance(together, alone), tolerance)

        direction = torch.randn(together.shape, generator=generator).to(machine.device)
        (together.float() * direction).sum().backward()
        (alone.float() * direction).sum().backward()
        report.at_most(f"gradients_{name}", _gradient_distance(packed, separate), tolerance)


def _gradient_distance(one: nn.Module, other: nn.Module) -> float:
    found = 0.0
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        found = max(found, _distance(left.grad, right.grad))
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-12)).item()


CHECKS: Checks = {"packing": packing}
