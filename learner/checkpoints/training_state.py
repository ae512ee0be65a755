"""The state of one rank in a checkpoint: weights, optimizer moments, the number of updates, random states.

Every rank writes pieces that no other rank writes, and reads the pieces that it holds, whichever rank wrote them. Why this is
not Megatron's checkpoint format: docs/decisions/checkpoints.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, WEIGHT, ModelFacts
from async_rl.megatron.parameters.pieces import Pieces, parameters_of
from learner.checkpoints.shards import held_parameters
from learner.model import TrainingModel


def capture(model: TrainingModel, name: str = POLICY) -> dict[str, Tensor]:
    """Return the tensors that this rank writes, flat. They are views, which the next update changes."""
    captured: dict[str, Tensor] = {}
    for held in held_parameters(model):
        if (saved := held.saved) is None or saved.is_empty:
            continue
        start, tensors = 0, {WEIGHT: held.parameter}
        if (optimized := held.optimized) is not None:
            start, tensors = optimized.stretch.start, {WEIGHT: optimized.main, **optimized.moments}
        for kind, tensor in tensors.items():
            captured[saved.key(name, kind)] = tensor.detach().flatten()[saved.start - start : saved.stop - start]
    return captured


def facts_of(model: TrainingModel) -> ModelFacts:
    return ModelFacts(updates=model.updates, parameters=parameters_of(model.rows), adapters=model.adapters)


def restore(model: TrainingModel, pieces: Pieces, facts: ModelFacts, name: str = POLICY) -> None:
    """Copy weights and moments in place. Parameters not saved keep their values; without moments Adam starts fresh."""
    kinds = sorted(pieces.kinds(name) - {WEIGHT})
    with torch.no_grad():
        for held in held_parameters(model):
            if held.whole.row.name not in facts.parameters:  # a value head that the checkpoint does not have
                continue
            held.parameter.copy_(pieces.read(name, WEIGHT, held.whole).view_as(held.parameter))
            if (optimized := held.optimized) is None:
                continue
            stretch, main = optimized.stretch, optimized.main
            if main.untyped_storage().data_ptr() != held.parameter.untyped_storage().data_ptr():
                main.copy_(pieces.read(name, WEIGHT, stretch).view_as(main))
            optimized.remember({kind: pieces.read(name, kind, stretch) for kind in kinds}, facts.updates)
    model.merge_adapters()
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
