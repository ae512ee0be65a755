"""One optimizer step over this rank's bins: forward, backward, agree that it is finite, update.

Every bin's loss is already its share of the whole step's (see losses.py), so the gradients of bins and ranks must be
*added*. Megatron divides by the number of micro-batches and averages over data-parallel ranks; both are undone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron import host
from async_rl.megatron.compat import PackedSeqParams, parallel_state
from async_rl.megatron.logprobs import token_logprobs
from async_rl.megatron.model import forward_packed, packed_params
from async_rl.rollout_config import SamplingConfig
from learner.batch import Bin
from learner.diagnostics import Totals
from learner.losses import PolicyLossConfig, StepCounts, policy_loss
from learner.model import TrainingModel

with host.quiet():
    from megatron.core.pipeline_parallel import get_forward_backward_func


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


def train_step(
    model: TrainingModel, config: PolicyLossConfig, bins: Sequence[Bin], counts: StepCounts, *, sampling: SamplingConfig
) -> StepResult:
    """Every rank must call it, with as many bins; the ranks of one data-parallel shard with the same ones."""
    rows = [_Row.on_device(each, model.device) for each in bins]
    objective = _Objective(
        config=config,
        counts=counts.to(model.device),
        vocab_size=model.shape.vocab_size,
        sampling=sampling,
        share=len(rows) * model.layout.data,
    )
    model.zero_gradients()
    reported = _forward_backward(model, objective, rows)
    totals = _over_all_ranks(reported)
    grad_norm, learning_rate = model.gradient_norm(), model.learning_rate
    skipped = not (math.isfinite(totals.loss) and math.isfinite(grad_norm))
    if not skipped:
        model.update(grad_norm)
    return StepResult(
        loss=totals.loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        skipped=skipped,
        metrics={f"policy/{name}": value for name, value in totals.metrics().items()},
    )


def _forward_backward(model: TrainingModel, objective: _Objective, rows: Sequence[_Row]) -> list[Totals]:
    """What the loss reported of each bin; nothing on ranks that do not hold the last layers."""

    def forward(rows: Iterator[_Row], ddp: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(rows)
        # the schedule around us needs the stand-in for CUDA; the model does not, and it would tax each of its calls
        with torch._C.DisableTorchFunction():
            return forward_packed(ddp, row.token_ids, row.positions, row.packing), partial(objective.loss, row)

    longest = max(len(row.token_ids) for row in rows)
    with host.on_host():
        reported: list[Totals] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(rows),
            model=[model.ddp],
            num_microbatches=len(rows),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=False,
        )
    return reported


def _over_all_ranks(reported: Sequence[Totals]) -> Totals:
    """Tensor-parallel ranks report the same numbers, so only the first of them counts."""
    counts_here = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    merged = reduce(Totals.merged, reported) if reported and counts_here else Totals.empty()
    sums, maxima = merged.sums.cpu(), merged.maxima.cpu()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return Totals(sums=sums, maxima=maxima)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """A bin on the device."""

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor
    packing: PackedSeqParams

    @staticmethod
    def on_device(source: Bin, device: torch.device) -> _Row:
        if len(source.token_ids) == 0:
            source = _FILLER

        def moved(array: np.ndarray) -> Tensor:
            # the copy makes it writable, which torch insists on
            return torch.from_numpy(array.copy()).to(device, non_blocking=True)

        cu_seqlens = moved(source.cu_seqlens)
        return _Row(
            token_ids=moved(source.token_ids).long(),
            positions=moved(source.positions).long(),
            targets=moved(source.targets).long(),
            mask=moved(source.mask),
            behaviour=moved(source.behaviour),
            advantages=moved(source.advantages),
            cu_seqlens=cu_seqlens,
            group_ids=moved(source.group_ids).long(),
            packing=packed_params(cu_seqlens, int(np.diff(source.cu_seqlens).max())),
        )


_FILLER = Bin(
    token_ids=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    targets=np.zeros(1, np.int32),
    mask=np.zeros(1, np.uint8),
    behaviour=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    cu_seqlens=np.array([0, 1], np.int32),
    group_ids=np.zeros(1, np.int32),
)
"""Stands in for an empty bin: one token that nobody trains on, because layers refuse rows without any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Objective:
    config: PolicyLossConfig
    counts: StepCounts
    vocab_size: int
    sampling: SamplingConfig
    share: int
    """What Megatron divides every gradient by: micro-batches times data-parallel ranks."""

    def loss(self, row: _Row, logits: Tensor) -> tuple[Tensor, Totals]:
        current = token_logprobs(
            logits,
            row.targets,
            vocab_size=self.vocab_size,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
        )
        made = policy_loss(
            self.config,
            current=current,
            behaviour=row.behaviour,
            advantages=row.advantages,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            # one update per batch: the policy before this step is the one being differentiated
            proximal=current.detach() if self.config.anchor == "proximal" else None,
            group_ids=row.group_ids,
            normaliser=self.counts,
        )
        return made.loss * self.share, made.totals
