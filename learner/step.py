"""One optimizer update from packed rows, or a forward pass over them, on one rank.

Each packed row is one microbatch of Megatron's schedule.

A row's loss is its share of the whole update's loss (see losses/functions.py), so the gradients of rows and ranks must be
*summed*. Megatron divides by the number of microbatches and averages over data-parallel ranks; both are undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.experts.routing import RoutingTotals
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.model import forward_packed
from learner.batches.device_rows import ModelRow
from learner.losses.functions import Loss
from learner.losses.totals import TotalNames, Totals
from learner.model import TrainingModel

with host.importing():
    from megatron.core.pipeline_parallel import get_forward_backward_func


T = TypeVar("T")
RowT = TypeVar("RowT", bound=ModelRow)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLoss(Generic[RowT]):
    names: TotalNames
    """Names of its totals; "loss" is among the sums."""
    of_row: Callable[[RowT, PackedOutput], Loss]
    """Returns the row's share of the update's loss, on the ranks that hold the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """The result of one update, the same on every rank."""

    totals: Totals
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    routing: RoutingTotals | None = None
    """What the routers of a model with experts did."""
    skipped: bool = False
    """True if the loss or gradient was not finite: the weights are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step's updates, the same on every rank."""

    loss: float
    grad_norm: float
    """The largest of the updates, before clipping."""
    learning_rate: float
    """The last update's."""
    skipped: bool
    """True if every update was skipped: the weights are unchanged."""
    metrics: Mapping[str, float]
    experts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the routers of a model with experts."""

    @staticmethod
    def of(updates: Sequence[Update]) -> StepResult:
        """Combine the updates that were not skipped, or all if every one was."""
        done = [each for each in updates if not each.skipped]
        reported = done if done else updates
        totals = Totals.averaged([each.totals for each in reported])
        routings = [each.routing for each in reported if each.routing is not None]
        return StepResult(
            loss=totals.sum_of("loss"),
            grad_norm=max(each.grad_norm for each in reported),
            learning_rate=reported[-1].learning_rate,
            skipped=not done,
            metrics=totals.metrics,
            experts=RoutingTotals.merged(routings).metrics if routings else {},
        )


def update(model: TrainingModel, loss: RowLoss[RowT], rows: Sequence[RowT]) -> Update:
    """Run one optimizer update. Collective: every rank passes the same number of rows, and ranks of one data-parallel shard the
    same rows.
    """
    rows = _filled_up(rows, model.chunks)
    share = len(rows) * model.layout.data

    def shared(row: RowT, output: PackedOutput) -> tuple[Tensor, Totals]:
        made = loss.of_row(row, output)
        return made.loss * share, made.totals

    model.zero_gradients()
    if model.routers is not None:
        model.routers.begin(sum(len(row.token_ids) for row in rows if not row.is_filler))
    reported: list[Totals] = _run(model.chunks, rows, shared, forward_only=False)
    totals = _over_all_ranks(reported, loss.names)
    routing = model.routers.ended() if model.routers is not None else None
    grad_norm, learning_rate = model.gradient_norm(), model.learning_rate
    skipped = not (math.isfinite(totals.sum_of("loss")) and math.isfinite(grad_norm))
    if not skipped:
        model.update(grad_norm)
    return Update(totals=totals, grad_norm=grad_norm, learning_rate=learning_rate, routing=routing, skipped=skipped)


def evaluate_loss(chunks: nn.ModuleList, loss: RowLoss[RowT], rows: Sequence[RowT]) -> Totals:
    """Return the totals of a loss over rows without training on them. Collective."""
    return _over_all_ranks(map_outputs(chunks, rows, lambda row, output: loss.of_row(row, output).totals), loss.names)


def map_outputs(chunks: nn.ModuleList, rows: Sequence[RowT], see: Callable[[RowT, PackedOutput], T]) -> list[T]:
    """Return `see(row, output)` for every row, without gradients; an empty list on ranks without the last layers."""

    def seen(row: RowT, output: PackedOutput) -> tuple[Tensor, T]:
        return output.hidden.new_zeros(()), see(row, output)

    with torch.no_grad():
        return _run(chunks, _filled_up(rows, chunks), seen, forward_only=True)[: len(rows)]


def _filled_up(rows: Sequence[RowT], chunks: nn.ModuleList) -> Sequence[RowT]:
    """Pad to a multiple of the pipeline stages, which interleaved schedules require."""
    missing = -len(rows) % parallel_state.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 0
    return [*rows, *[rows[0].as_filler()] * missing]


def _run(
    chunks: nn.ModuleList,
    rows: Sequence[RowT],
    judged: Callable[[RowT, PackedOutput], tuple[Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's schedule over the rows. Returns what `judged` reported for each, on the ranks with the last layers."""

    def forward(rows: Iterator[RowT], module: nn.Module) -> tuple[Tensor, Any]:
        row = next(rows)
        # only the schedule needs the CUDA stand-in (see host); the model runs without it, because it slows down every call
        with torch._C.DisableTorchFunction():
            output = forward_packed(module, row.token_ids, row.positions, row.packing)
        return output.hidden, lambda _hidden: judged(row, output)

    longest = max(len(row.token_ids) for row in rows)
    with host.on_host():
        reported: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(rows),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return reported


def _over_all_ranks(reported: Sequence[Totals], names: TotalNames) -> Totals:
    """Reduce totals over all ranks. Tensor and context ranks of a row report the same numbers, so only the first counts."""
    sharing = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_context_parallel_rank()
    counts_here = parallel_state.is_pipeline_last_stage() and sharing == 0
    merged = reduce(Totals.merged, reported) if reported and counts_here else Totals.empty(names)
    sums, maxima = merged.sums.cpu(), merged.maxima.cpu()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return Totals(names=names, sums=sums, maxima=maxima)
