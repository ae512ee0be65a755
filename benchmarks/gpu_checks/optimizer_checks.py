"""Checks of an update: the gradient norm in one operation, torch's fused Adam, and moments that are kept in host memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.plan.parameters import CHUNK
from gpu_checks.ceilings import seconds_of
from gpu_checks.host_waits import host_waits
from gpu_checks.learner_checks import REINFORCE, batch, config
from gpu_checks.report import SMALL, Checks, Machine, Report
from learner.model import TrainingModel
from learner.optimizer.host_moments import HostMoments
from learner.ranks.rank_group import RankGroup

LEARNING_RATE = 1e-3
TOLERANCE = 1e-3
"""Largest error, relative to what an update adds to a weight, which is rounded with it."""
BIG = (4096, 4096)
"""A matrix of the models that need their moments elsewhere."""


def optimizer(machine: Machine, report: Report) -> None:
    """The first update of a learner beside Adam's formula in float64, the norm beside that of all gradients one by one."""
    rank_group = RankGroup(config(LEARNING_RATE), REINFORCE, SMALL)
    model = rank_group.model
    before = [each.detach().double().clone() for each in _trained(model)]
    result = rank_group.step(batch(SMALL, [300, 500, 128, 400]))
    report.require(not result.skipped, "the step was not finite")
    gradients = [_gradient(each).double() for each in _trained(model)]  # as Adam got them
    expected = [
        weight - LEARNING_RATE * gradient / (gradient.abs() + 1e-8) for weight, gradient in zip(before, gradients, strict=True)
    ]
    steps = [
        (after.detach().double() - wanted).abs().max().item() / LEARNING_RATE
        for after, wanted in zip(_trained(model), expected, strict=True)
    ]
    report.at_most("adam_distance", max(steps), TOLERANCE)

    precise = torch.stack([each.double().norm() for each in gradients]).norm().item()
    found = model.gradient_norm()
    report.at_most("norm_distance", abs(found - precise) / precise, 1e-5)
    report.note(norm_waits=host_waits(machine, model.gradient_norm))
    report.note(update_waits=host_waits(machine, lambda: model.update(found)))
    report.note(
        norm_ms=1e3 * seconds_of(machine, model.gradient_norm),
        update_ms=1e3 * seconds_of(machine, lambda: model.update(found)),
        parameters=len(gradients),
    )
    rank_group.stop()


def _trained(model: TrainingModel) -> list[Tensor]:
    """What the optimizer updates: float32 copies of the weights, where these are bfloat16."""
    return [each for one in model.optimizers for each in one.get_parameters()]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def offload(machine: Machine, report: Report) -> None:
    """Moments in host memory: the same bits as beside the weights, what is on the device meanwhile, and what that costs."""
    sizes = [BIG] * 24 if machine.is_gpu else [(16, 16)] * 6
    chunk = CHUNK if machine.is_gpu else 2 * 2 * 16 * 16 * 4
    resident, moved = (_adam(machine, sizes) for _ in range(2))
    HostMoments(moved, machine.device, chunk_bytes=chunk)
    for seed in range(3):
        for each in (resident, moved):
            _set_gradients(machine, each, seed)
            each.step()
    machine.synchronize()
    pairs = [*zip(_parameters(resident), _parameters(moved), strict=True)]
    report.require(all(torch.equal(one, other) for one, other in pairs), "weights differ from those with resident moments")

    states = [moved.state[each] for each in _parameters(moved)]
    moments = [state[kind] for state in states for kind in ("exp_avg", "exp_avg_sq")]
    report.require({each.device.type for each in moments} == {"cpu"}, "moments are not in host memory")
    exact = all(
        torch.equal(resident.state[one][kind].to(host.HOST), moved.state[other][kind])
        for one, other in pairs
        for kind in ("exp_avg", "exp_avg_sq")
    )
    report.require(exact, "moments differ from the resident ones")
    size = sum(each.nbytes for each in moments)
    report.note(moments_gb=size / 1e9, chunk_gb=chunk / 1e9)
    report.note(resident_ms=1e3 * seconds_of(machine, resident.step))
    if machine.is_gpu:
        report.require(all(each.is_pinned() for each in moments), "moments are not in pinned memory")
        report.note(waits=host_waits(machine, moved.step))
        machine.synchronize()
        torch.cuda.reset_peak_memory_stats(machine.device)
        before = torch.cuda.memory_allocated(machine.device)
        moved.step()
        machine.synchronize()
        report.at_most("peak_chunks", (torch.cuda.max_memory_allocated(machine.device) - before) / chunk, 2.5)
    seconds = seconds_of(machine, moved.step)
    report.note(offloaded_ms=1e3 * seconds, both_ways_gb_s=2 * size / seconds / 1e9)


def _adam(machine: Machine, sizes: list[tuple[int, int]]) -> torch.optim.AdamW:
    random = torch.Generator(machine.device).manual_seed(1)
    weights = [nn.Parameter(torch.randn(size, generator=random, device=machine.device)) for size in sizes]
    return torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _set_gradients(machine: Machine, optimizer: torch.optim.Optimizer, seed: int) -> None:
    random = torch.Generator(machine.device).manual_seed(seed)
    for each in _parameters(optimizer):
        each.grad = torch.randn(each.shape, generator=random, device=machine.device)


CHECKS: Checks = {"optimizer": optimizer, "offload": offload}
