"""The parts of parameters that a rank holds, that its optimizer updates, and that it writes to a checkpoint.

Megatron's distributed optimizer concatenates all parameters and gives each data-parallel rank an equal stretch, so a rank may
update a few elements in the middle of a matrix. Replicated parameters are split here among the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parameters.full_parameters import local_parameters
from async_rl.megatron.parameters.pieces import Stretch
from async_rl.megatron.parameters.table import EMBEDDING, OUTPUT, Parameter, Split
from learner.model import TrainingModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerSlice:
    """The part of a parameter that this rank's optimizer updates."""

    stretch: Stretch
    main: Tensor
    """The parameter itself, a float32 copy of it, or a shard of either."""
    optimizer: torch.optim.Optimizer
    moments_device: torch.device
    """Where moments are between updates."""

    @property
    def moments(self) -> dict[str, Tensor]:
        """Adam's moments by name; empty before the first update."""
        known: dict[str, Any] = self.optimizer.state.get(self.main, {})
        return {kind: each for kind, each in known.items() if isinstance(each, Tensor) and each.shape == self.main.shape}

    def remember(self, moments: dict[str, Tensor], updates: int) -> None:
        """Set moments and update count. torch's Adam counts updates per parameter, the fused optimizers per parameter group."""
        state: dict[str, Any] = self.optimizer.state[self.main]
        state.clear()
        if not moments:
            return
        state |= {kind: each.view_as(self.main).to(self.moments_device, copy=True) for kind, each in moments.items()}
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            state["step"] = torch.tensor(float(updates), device=self.main.device)  # the fused kernel reads it there
        else:
            for group in self.optimizer.param_groups:
                group["step"] = updates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldParameter:
    parameter: Tensor
    whole: Stretch
    """The part of the parameter on this rank."""
    optimized: OptimizerSlice | None
    """None if the parameter is frozen, or another rank's optimizer updates all of it."""
    saved: Stretch | None
    """The part this rank writes; None if other ranks write it."""


def held_parameters(model: TrainingModel) -> Iterator[HeldParameter]:
    """Yield the parameters that are trained."""
    rows = {row.name: row for row in model.rows}
    optimizers = _Optimizers(model)
    for name, parameter in local_parameters(model.chunks).items():
        is_copy = name == OUTPUT and model.shape.tied_embeddings
        if (row := rows.get(EMBEDDING if is_copy else name)) is None:  # the base of adapters
            continue
        whole = Stretch.whole(row, *_place(row))
        optimized = optimizers.find(parameter, whole)
        if is_copy or not _is_first_holder(row):
            saved = None
        elif optimizers.are_divided and parameter.requires_grad:
            saved = optimized.stretch if optimized is not None else None
        else:
            saved = whole.share(*_replica(row))
        yield HeldParameter(parameter=parameter, whole=whole, optimized=optimized, saved=saved)


def _place(row: Parameter) -> tuple[int, int]:
    """Return tensor rank and size; (0, 1) for parameters that every tensor rank holds whole."""
    if row.split is Split.WHOLE:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _is_first_holder(row: Parameter) -> bool:
    """Whether this is the first tensor rank that holds the parameter. Ranks with the same expert count as data-parallel."""
    return row.split is not Split.WHOLE or row.expert is not None or parallel_state.get_tensor_model_parallel_rank() == 0


def _replica(row: Parameter) -> tuple[int, int]:
    """Return this rank's index among the replicas of a parameter, and their number."""
    if row.expert is not None:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


class _Optimizers:
    """The optimizers of a model; Megatron chains one per kind of parameter."""

    def __init__(self, model: TrainingModel) -> None:
        self._moments_device = model.moments_device
        real: list[Any] = [each for each in model.optimizers if each.optimizer is not None]
        self._divided = [each for each in real if hasattr(each, "model_param_gbuf_map")]
        self._of_main = {
            id(main): each.optimizer for each in real for group in each.optimizer.param_groups for main in group["params"]
        }

    @property
    def are_divided(self) -> bool:
        """Whether optimizer state is sharded over data-parallel ranks."""
        return bool(self._divided)

    def find(self, parameter: nn.Parameter, whole: Stretch) -> OptimizerSlice | None:
        for each in self._divided:
            if parameter in each.model_param_gbuf_map:
                found = each._get_model_param_range_map(parameter)["param"]
                group, place = each.model_param_group_index_map[parameter]
                main = each.optimizer.param_groups[group]["params"][place]
                return self._slice(whole.part(found.start, found.end), main, each.optimizer)
        main = getattr(parameter, "main_param", parameter)
        if (optimizer := self._of_main.get(id(main))) is None:
            return None
        return self._slice(whole, main, optimizer)

    def _slice(self, stretch: Stretch, main: Tensor, optimizer: torch.optim.Optimizer) -> OptimizerSlice:
        place = self._moments_device if self._moments_device is not None else main.device
        return OptimizerSlice(stretch=stretch, main=main, optimizer=optimizer, moments_device=place)
