"""What a rank does with rows: one optimizer update from them, or a look at what the model says of them.

A loss gives each row's share of the whole update's loss (see losses.py), so the gradients of rows and ranks must be
*added*. Megatron divides by the number of micro-batches and averages over data-parallel ranks; both are undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.model import forward_packed
from learner.model import TrainingModel
from learner.rows import Row
from learner.totals import Names, Totals

with host.quiet():
    from megatron.core.pipeline_parallel import get_forward_backward_func


class RowLoss(Protocol):
    """What an update minimises, row by row. Called on the ranks that hold the model's last layers."""

    @property
    def names(self) -> Names:
        """Of what it reports; "loss" is among the sums."""
        ...

    def __call__(self, row: Row, output: Tensor) -> tuple[Tensor, Totals]:
        """The row's share of the update's loss, with its gradient, from what the model's last layer gave."""
        ...

    def metrics(self, totals: Totals) -> dict[str, float]:
        """Of the whole update, for people."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    skipped: bool
    """The loss or the gradient was not finite: the weights are unchanged."""
    metrics: Mapping[str, float]


def train_step(model: TrainingModel, loss: RowLoss, rows: Sequence[Row]) -> StepResult:
    """Every rank must call it, with as many rows; the ranks of one data-parallel shard with the same ones."""
    share = len(rows) * model.layout.data

    def shared(row: Row, output: Tensor) -> tuple[Tensor, Totals]:
        made, totals = loss(row, output)
        return made * share, totals

    model.zero_gradients()
    reported: list[Totals] = _run(model.ddp, rows, shared, forward_only=False)
    totals = _over_all_ranks(reported, loss.names)
    value, grad_norm, learning_rate = totals.sum_of("loss"), model.gradient_norm(), model.learning_rate
    skipped = not (math.isfinite(value) and math.isfinite(grad_norm))
    if not skipped:
        model.update(grad_norm)
    return StepResult(
        loss=value, grad_norm=grad_norm, learning_rate=learning_rate, skipped=skipped, metrics=loss.metrics(totals)
    )


def look(model: nn.Module, rows: Sequence[Row], see: Callable[[Row, Tensor], Tensor]) -> list[Tensor]:
    """`see` of every row and what the model gives for it, without gradients; nothing on ranks without the last layers."""

    def seen(row: Row, output: Tensor) -> tuple[Tensor, Tensor]:
        found = see(row, output)
        return found.new_zeros(()), found

    with torch.no_grad():
        return _run(model, rows, seen, forward_only=True)


def _run(
    model: nn.Module, rows: Sequence[Row], judge: Callable[[Row, Tensor], tuple[Tensor, Any]], *, forward_only: bool
) -> list[Any]:
    """Megatron's schedule over the rows; what `judge` reported of each, on the ranks that hold the last layers."""

    def forward(rows: Iterator[Row], module: nn.Module) -> tuple[Tensor, Any]:
        row = next(rows)
        # the schedule around us needs the stand-in for CUDA; the model does not, and it would tax each of its calls
        with torch._C.DisableTorchFunction():
            return forward_packed(module, row.token_ids, row.positions, row.packing), partial(judge, row)

    longest = max(len(row.token_ids) for row in rows)
    with host.on_host():
        reported: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(rows),
            model=[model],
            num_microbatches=len(rows),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return reported


def _over_all_ranks(reported: Sequence[Totals], names: Names) -> Totals:
    """Tensor-parallel ranks report the same numbers, so only the first of them counts."""
    counts_here = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    merged = reduce(Totals.merged, reported) if reported and counts_here else Totals.empty(names)
    sums, maxima = merged.sums.cpu(), merged.maxima.cpu()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return Totals(names=names, sums=sums, maxima=maxima)
