"""All that one rank must remember to train on exactly: weights, the optimizer's moments, the place in the schedule.

It goes by a door of our own: docs/decisions/checkpoints.md says why. Every rank gives the pieces that nobody else gives, and
takes those that it holds, whoever gave them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, WEIGHT, ModelFacts
from async_rl.megatron.parameters.pieces import Pieces, parameters_of
from learner.checkpoints.shards import held_parameters
from learner.model import TrainingModel


def capture(model: TrainingModel, name: str = POLICY) -> dict[str, Tensor]:
    """What this rank gives to a checkpoint, flat. They are views: training on changes them."""
    captured: dict[str, Tensor] = {}
    for held in held_parameters(model):
        if (given := held.given) is None or given.is_empty:
            continue
        start, tensors = 0, {WEIGHT: held.parameter}
        if (optimized := held.optimized) is not None:
            start, tensors = optimized.stretch.start, {WEIGHT: optimized.main, **optimized.moments}
        for kind, tensor in tensors.items():
            captured[given.key(name, kind)] = tensor.detach().flatten()[given.start - start : given.stop - start]
    return captured


def facts_of(model: TrainingModel) -> ModelFacts:
    return ModelFacts(updates=model.updates, parameters=parameters_of(model.shape))


def restore(model: TrainingModel, pieces: Pieces, facts: ModelFacts, name: str = POLICY) -> None:
    """Weights are copied in place. Where no moments were saved, the optimizer begins anew; where no weights, they stay."""
    kinds = sorted(pieces.kinds(name) - {WEIGHT})
    with torch.no_grad():
        for held in held_parameters(model):
            if held.whole.row.name not in facts.parameters:  # values that the checkpoint's model did not give yet
                continue
            held.parameter.copy_(pieces.read(name, WEIGHT, held.whole).view_as(held.parameter))
            if (optimized := held.optimized) is None:
                continue
            stretch, main = optimized.stretch, optimized.main
            if main.untyped_storage().data_ptr() != held.parameter.untyped_storage().data_ptr():
                main.copy_(pieces.read(name, WEIGHT, stretch).view_as(main))
            optimized.remember({kind: pieces.read(name, kind, stretch) for kind in kinds}, facts.updates)
    model.updates = facts.updates


def capture_random(rank: int, device: torch.device) -> dict[str, Tensor]:
    captured = {_random("cpu", rank): torch.get_rng_state()}
    if device.type == "cuda":
        captured[_random("cuda", rank)] = torch.cuda.get_rng_state(device)
    return captured


def restore_random(pieces: Pieces, rank: int, device: torch.device) -> None:
    if (state := pieces.get(_random("cpu", rank))) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := pieces.get(_random("cuda", rank))) is not None:
        torch.cuda.set_rng_state(state, device)


def _random(kind: str, rank: int) -> str:
    return f"random/{kind}/{rank}"
