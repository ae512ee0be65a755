"""The losses of one packed row in RL: of the policy, of a separate critic, or of a model that is both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_rl.megatron.heads.packed_output import PackedOutput
from learner.batches.device_rows import DeviceRow
from learner.losses.aggregation import StepCounts
from learner.losses.config import ValueLossConfig
from learner.losses.diagnostics import POLICY
from learner.losses.functions import Loss, value_loss
from learner.losses.reports import VALUE
from learner.losses.totals import TotalNames, Totals
from learner.step import RowLoss

ReadPolicy = Callable[[DeviceRow, PackedOutput], tuple[Tensor, Tensor | None]]
"""(row, output) -> log-probabilities of the row's targets, and entropies of the whole distributions or None."""


def policy_row_loss(loss: Callable[..., Loss], counts: StepCounts, read: ReadPolicy) -> RowLoss[DeviceRow]:
    """Return the loss over log-probabilities. `loss` is called with the arguments of `policy_loss` after its config."""

    def of_row(row: DeviceRow, output: PackedOutput) -> Loss:
        current, entropy = read(row, output)
        return loss(
            current=current,
            behaviour=row.behaviour,
            advantages=row.advantages,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            # in a step's first and only update the proximal policy equals the current one
            proximal=row.proximal if row.proximal is not None else current.detach(),
            reference=row.reference,
            entropy=entropy,
            ages=row.ages,
            group_ids=row.group_ids,
            normaliser=counts,
        )

    return RowLoss(names=POLICY.under("policy"), of_row=of_row)


def value_row_loss(config: ValueLossConfig, counts: StepCounts) -> RowLoss[DeviceRow]:
    """Return the loss over values."""

    def of_row(row: DeviceRow, output: PackedOutput) -> Loss:
        assert row.values is not None
        assert row.returns is not None
        return value_loss(
            config,
            values=output.values(),
            old_values=row.values,
            returns=row.returns,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            normaliser=counts,
        )

    return RowLoss(names=VALUE.under("value"), of_row=of_row)


def shared_row_loss(policy: RowLoss[DeviceRow], value: RowLoss[DeviceRow], *, coefficient: float) -> RowLoss[DeviceRow]:
    """Return the loss over log-probabilities and values of one model: policy + coefficient * value."""

    def describe(totals: Totals) -> dict[str, float]:
        first, middle = 1 + len(policy.names.sums), len(policy.names.maxima)
        of_policy = Totals(names=policy.names, sums=totals.sums[1:first], maxima=totals.maxima[:middle])
        of_value = Totals(names=value.names, sums=totals.sums[first:], maxima=totals.maxima[middle:])
        return of_policy.metrics | of_value.metrics

    parts = {"policy": policy.names, "value": value.names}
    names = TotalNames(
        sums=("loss", *(f"{part}/{name}" for part, those in parts.items() for name in those.sums)),
        maxima=tuple(f"{part}/{name}" for part, those in parts.items() for name in those.maxima),
        describe=describe,
    )

    def of_row(row: DeviceRow, output: PackedOutput) -> Loss:
        of_policy, of_value = policy.of_row(row, output), value.of_row(row, output)
        loss = of_policy.loss + coefficient * of_value.loss
        sums = torch.cat([loss.detach().double().view(1), of_policy.totals.sums, of_value.totals.sums])
        maxima = torch.cat([of_policy.totals.maxima, of_value.totals.maxima])
        return Loss(loss=loss, totals=Totals(names=names, sums=sums, maxima=maxima))

    return RowLoss(names=names, of_row=of_row)
