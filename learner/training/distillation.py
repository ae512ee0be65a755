"""Distillation from a teacher: the divergence of whole distributions at each trained token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.divergence import Direction, divergence
from async_rl.megatron.logprobs import token_logprobs
from learner.losses.reports import SFT, sft_metrics
from learner.losses.totals import TotalNames, Totals
from learner.training.packed import ExampleCounts, TextRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationRowLoss:
    """A RowLoss over logits."""

    teacher: Callable[[TextRow], Tensor]
    """Returns the teacher's logits of a row. Called row by row, because the logits of a whole step would not fit in memory."""
    direction: Direction
    temperature: float
    vocab_size: int
    counts: ExampleCounts
    """Counts of the whole update."""

    @property
    def names(self) -> TotalNames:
        return SFT

    def __call__(self, row: TextRow, output: Tensor) -> tuple[Tensor, Totals]:
        divergences = divergence(
            output,
            self.teacher(row),
            vocab_size=self.vocab_size,
            direction=self.direction,
            temperature=self.temperature,
        )
        is_trained = row.mask != 0
        loss = torch.where(is_trained, divergences, 0.0).sum() / max(self.counts.tokens, 1)
        with torch.no_grad():
            logprobs = token_logprobs(output, row.targets, vocab_size=self.vocab_size)
        sums = {"loss": loss, "tokens": is_trained.sum(), "nll": -torch.where(is_trained, logprobs, 0.0).sum()}
        return loss, Totals.of(SFT, sums)

    def metrics(self, totals: Totals) -> dict[str, float]:
        return sft_metrics(totals)
