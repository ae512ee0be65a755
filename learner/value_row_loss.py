"""The critic's loss of one packed row: alone for a separate critic, or added to the policy's loss where they share a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.value_head import split
from learner.batches.device_rows import DeviceRow
from learner.losses import value_loss
from learner.losses.aggregation import StepCounts
from learner.losses.config import ValueLossConfig
from learner.losses.reports import VALUE, value_metrics
from learner.losses.totals import TotalNames, Totals
from learner.policy_row_loss import PolicyRowLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueRowLoss:
    """A RowLoss over values, [T]."""

    config: ValueLossConfig
    counts: StepCounts
    """Counts of the whole update."""

    @property
    def names(self) -> TotalNames:
        return VALUE

    def __call__(self, row: DeviceRow, output: Tensor) -> tuple[Tensor, Totals]:
        assert row.values is not None
        assert row.returns is not None
        made = value_loss(
            self.config,
            values=output.view(-1).float(),
            old_values=row.values,
            returns=row.returns,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            normaliser=self.counts,
        )
        return made.loss, made.totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        return {f"value/{name}": value for name, value in value_metrics(totals).items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRowLoss:
    """A RowLoss over logits and values of one model: policy + coefficient * value."""

    policy: PolicyRowLoss
    value: ValueRowLoss
    coefficient: float

    @property
    def names(self) -> TotalNames:
        """The joint loss, then the totals of the policy, then those of the critic."""
        policy, value = self.policy.names, self.value.names
        return TotalNames(
            sums=("loss", *(f"policy/{name}" for name in policy.sums), *(f"value/{name}" for name in value.sums)),
            maxima=(*(f"policy/{name}" for name in policy.maxima), *(f"value/{name}" for name in value.maxima)),
        )

    def __call__(self, row: DeviceRow, output: Tensor) -> tuple[Tensor, Totals]:
        logits, values = split(output, "both")
        of_policy, policy_totals = self.policy(row, logits)
        of_value, value_totals = self.value(row, values)
        loss = of_policy + self.coefficient * of_value
        totals = Totals(
            names=self.names,
            sums=torch.cat([loss.detach().double().view(1), policy_totals.sums, value_totals.sums]),
            maxima=torch.cat([policy_totals.maxima, value_totals.maxima]),
        )
        return loss, totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        first = 1 + len(self.policy.names.sums)
        middle = len(self.policy.names.maxima)
        of_policy = Totals(names=self.policy.names, sums=totals.sums[1:first], maxima=totals.maxima[:middle])
        of_value = Totals(names=self.value.names, sums=totals.sums[first:], maxima=totals.maxima[middle:])
        return self.policy.metrics(of_policy) | self.value.metrics(of_value)
