"""Which part of which parameter a rank holds, which of it its optimizer updates, and which it gives to a checkpoint.

Megatron's distributed optimizer lays all parameters end to end and deals the data-parallel ranks equal stretches of that, so
a rank may update a few elements in the middle of a matrix. What it does not divide, those who hold the same divide here.
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
from async_rl.megatron.parameters.table import EMBEDDING, OUTPUT, Parameter, Split, table
from learner.model import TrainingModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerSlice:
    """What an optimizer updates of a parameter."""

    stretch: Stretch
    main: Tensor
    """The parameter itself, a float32 copy of it, or a shard of either."""
    optimizer: torch.optim.Optimizer

    @property
    def moments(self) -> dict[str, Tensor]:
        """An optimizer that never stepped has none."""
        known: dict[str, Any] = self.optimizer.state.get(self.main, {})
        return {kind: each for kind, each in known.items() if isinstance(each, Tensor) and each.shape == self.main.shape}

    def remember(self, moments: dict[str, Tensor], updates: int) -> None:
        """How often it updated, torch's Adam counts for each parameter, and the fused ones for a whole group."""
        state: dict[str, Any] = self.optimizer.state[self.main]
        state.clear()
        if not moments:
            return
        state |= {kind: each.view_as(self.main).to(self.main.device, copy=True) for kind, each in moments.items()}
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            state["step"] = torch.tensor(float(updates))
        else:
            for group in self.optimizer.param_groups:
                group["step"] = updates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldParameter:
    parameter: Tensor
    whole: Stretch
    """All that the parameter is on this rank."""
    optimized: OptimizerSlice | None
    """None where it is frozen, or another rank has all of it in its optimizer."""
    given: Stretch | None
    """None where other ranks give the same."""


def held_parameters(model: TrainingModel) -> Iterator[HeldParameter]:
    rows = {row.name: row for row in table(model.shape)}
    optimizers = _Optimizers(model)
    for name, parameter in local_parameters(model.chunks).items():
        is_copy = name == OUTPUT and model.shape.tied_embeddings
        row = rows[EMBEDDING if is_copy else name]
        whole = Stretch.whole(row, *_place(row))
        optimized = optimizers.find(parameter, whole)
        if is_copy or not _is_first_holder(row):
            given = None
        elif optimizers.are_divided and parameter.requires_grad:
            given = optimized.stretch if optimized is not None else None
        else:
            given = whole.share(*_replica(row))
        yield HeldParameter(parameter=parameter, whole=whole, optimized=optimized, given=given)


def _place(row: Parameter) -> tuple[int, int]:
    """What is on every tensor rank is on none of them in particular."""
    if row.split is Split.WHOLE:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _is_first_holder(row: Parameter) -> bool:
    """Among the tensor ranks. Those that hold the same expert count as data-parallel instead."""
    return row.split is not Split.WHOLE or row.expert is not None or parallel_state.get_tensor_model_parallel_rank() == 0


def _replica(row: Parameter) -> tuple[int, int]:
    """Which of the ranks that hold the same, and of how many."""
    if row.expert is not None:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


class _Optimizers:
    """Megatron's, which it chains one per kind of parameter."""

    def __init__(self, model: TrainingModel) -> None:
        real: list[Any] = [each for each in model.optimizers if each.optimizer is not None]
        self._divided = [each for each in real if hasattr(each, "model_param_gbuf_map")]
        self._of_main = {
            id(main): each.optimizer for each in real for group in each.optimizer.param_groups for main in group["params"]
        }

    @property
    def are_divided(self) -> bool:
        """Among data-parallel ranks."""
        return bool(self._divided)

    def find(self, parameter: nn.Parameter, whole: Stretch) -> OptimizerSlice | None:
        for each in self._divided:
            if parameter in each.model_param_gbuf_map:
                found = each._get_model_param_range_map(parameter)["param"]
                group, place = each.model_param_group_index_map[parameter]
                main = each.optimizer.param_groups[group]["params"][place]
                return OptimizerSlice(stretch=whole.part(found.start, found.end), main=main, optimizer=each.optimizer)
        main = getattr(parameter, "main_param", parameter)
        if (optimizer := self._of_main.get(id(main))) is None:
            return None
        return OptimizerSlice(stretch=whole, main=main, optimizer=optimizer)
