"""All that one rank must remember to train on exactly: weights, optimizer moments, float32 copies, random state.

A flat table of named tensors, in a door of our own: Megatron's way of loading its optimizer's state needs Apex or
Transformer Engine. The optimizer's part goes by position, which is fixed by the model's shape and the layout of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.errors import CheckpointError
from async_rl.megatron.parameters import local_parameters
from learner.model import TrainingModel


def capture(model: TrainingModel) -> dict[str, Tensor]:
    """Copies, on the CPU."""
    captured: dict[str, Tensor] = {f"weights.{name}": each for name, each in local_parameters(model.ddp).items()}
    for slot in _optimizer_slots(model):
        if slot.is_a_copy:
            captured[f"{slot.name}.main"] = slot.parameter
        captured |= {f"{slot.name}.{key}": value for key, value in slot.moments.items()}
    captured["updates"] = torch.tensor(model.updates)
    captured["random.cpu"] = torch.get_rng_state()
    if model.device.type == "cuda":
        captured["random.cuda"] = torch.cuda.get_rng_state(model.device)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in captured.items()}


def restore(model: TrainingModel, state: Mapping[str, Tensor]) -> None:
    """The opposite. Weights are copied in place; nothing changes unless everything fits."""
    weights = {f"weights.{name}": each for name, each in local_parameters(model.ddp).items()}
    slots = _optimizer_slots(model)
    copies = {f"{slot.name}.main": slot.parameter for slot in slots if slot.is_a_copy}
    _check(weights | copies, state)
    with torch.no_grad():
        for name, parameter in [*weights.items(), *copies.items()]:
            parameter.copy_(state[name])
    for slot in slots:
        slot.moments.clear()
        slot.moments.update(_moments(state, slot))
    model.updates = int(state["updates"])
    torch.set_rng_state(state["random.cpu"])
    if model.device.type == "cuda":
        torch.cuda.set_rng_state(state["random.cuda"], model.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slot:
    """Something that this rank's optimizers update."""

    name: str
    parameter: Tensor
    """The model's own, a float32 copy of it, or a shard of either."""
    is_a_copy: bool
    moments: dict[str, Tensor]
    """Live: the optimizer's own dictionary."""


def _optimizer_slots(model: TrainingModel) -> list[_Slot]:
    memory_of_model = {each.untyped_storage().data_ptr() for each in model.ddp.parameters()}
    return [
        _Slot(
            name=f"optimizer.{chained}.{at}.{place}",
            parameter=parameter,
            is_a_copy=parameter.untyped_storage().data_ptr() not in memory_of_model,
            moments=wrapper.optimizer.state[parameter],
        )
        for chained, wrapper in enumerate(model.optimizers)
        if wrapper.optimizer is not None
        for at, group in enumerate(wrapper.optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def _moments(state: Mapping[str, Tensor], slot: _Slot) -> dict[str, Tensor]:
    """An optimizer that never stepped has none. `step` stays on the CPU, where torch's optimizers expect it."""
    prefix, device = f"{slot.name}.", slot.parameter.device
    saved = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    saved.pop("main", None)
    return {key: tensor.clone() if tensor.ndim == 0 else tensor.to(device, copy=True) for key, tensor in saved.items()}


def _check(live: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name, tensor in live.items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"shape {tuple(state[name].shape)}" if name in state else "nothing"
            raise CheckpointError(
                f"the checkpoint belongs to another model: {name} has shape {tuple(tensor.shape)} here and {found} there; "
                "use its `model` section, or another run.name"
            )
