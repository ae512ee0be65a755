"""Checks of the model that learner and engine share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from async_rl.megatron import parallel
from async_rl.megatron.experts.grouped import what_is_missing
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import Experts, ModelShape
from gpu_checks.ceilings import seconds_of
from gpu_checks.host_waits import host_waits
from gpu_checks.report import SMALL, Checks, Machine, Report

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Tolerance for logits and gradients, relative to the largest. bfloat16 has 8 bits, and both computations round differently."""
FEW_EXPERTS = replace(SMALL, layers=1, experts=Experts(number=8, per_token=2, ffn=64, layers=(0,)))
MANY_EXPERTS = replace(SMALL, hidden=1024, layers=1, experts=Experts(number=128, per_token=8, ffn=768, layers=(0,)))
"""As many experts, and as small ones, as Qwen3-30B-A3B has. In one layer: routers behind it would choose other experts where
what they are given is rounded otherwise."""


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


def experts(machine: Machine, report: Report) -> None:
    """Experts by grouped products beside experts one by one, in bfloat16: logits, gradients, waits, time. A device without the
    kernels says no: it computes them one by one, and so do runs there.
    """
    parallel.initialize(device=machine.device)
    shape = MANY_EXPERTS if machine.is_gpu else FEW_EXPERTS
    missing = what_is_missing(shape, machine.device, torch.bfloat16)
    report.note(runs_use_them="yes" if missing is None else f"no ({missing})")
    tokens = 4096 if machine.is_gpu else 64
    single = _experts_ms(machine, shape, tokens, grouped=False, report=report)
    if missing is None or not machine.is_gpu:  # a dry run computes them all the same
        together = _experts_ms(machine, shape, tokens, grouped=True, report=report)
    else:
        report.attempt("grouped_ms", lambda: _experts_ms(machine, shape, tokens, grouped=True, report=report).ms)
        return
    report.at_most("logits", _distance(together.logits, single.logits), TOLERANCES[torch.bfloat16])
    differences = [
        _distance(gradient, single.gradients.get(name, torch.zeros_like(gradient)))  # an expert without tokens has none alone
        for name, gradient in together.gradients.items()
        if single.gradients.get(name, gradient).abs().max() > 0
    ]
    report.at_most("gradients", max(differences), TOLERANCES[torch.bfloat16])


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfExperts:
    ms: float
    logits: Tensor
    gradients: dict[str, Tensor]


def _experts_ms(machine: Machine, shape: ModelShape, tokens: int, *, grouped: bool, report: Report) -> _OfExperts:
    """Compute a packed row forward and backward, and note what that took."""
    model = build_model(shape, device=machine.device, dtype=torch.bfloat16, seed=1, grouped_experts=grouped)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(0, shape.vocab_size, (tokens // 4,), generator=generator).to(machine.device) for _ in range(4)]
    direction = torch.randn(tokens, shape.vocab_size, generator=generator).to(machine.device)
    made: list[Tensor] = []

    def both() -> None:
        model.zero_grad()
        logits = forward_packed(model, *pack(rows)).logits()
        made[:] = [logits.detach()]
        (logits.float() * direction).sum().backward()

    name = "grouped" if grouped else "single"
    both()
    report.note(**{f"{name}_waits": host_waits(machine, both)})
    ms = 1e3 * seconds_of(machine, both, repeats=3, warm_up=0)
    report.note(**{f"{name}_ms": ms})
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return _OfExperts(ms=ms, logits=made[0], gradients=gradients)


CHECKS: Checks = {"packing": packing, "experts": experts}
