"""Learning to say what a teacher would: the divergence of whole distributions, at each token that the model is meant to say."""

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
    """Its logits. Asked row by row, because those of a whole step would fill the memory."""
    direction: Direction
    temperature: float
    vocab_size: int
    counts: ExampleCounts
    """Of the update."""

    @property
    def names(self) -> TotalNames:
        return SFT

    def __call__(self, row: TextRow, output: Tensor) -> tuple[Tensor, Totals]:
        apart = divergence(
            output,
            self.teacher(row),
            vocab_size=self.vocab_size,
            direction=self.direction,
            temperature=self.temperature,
        )
        is_said = row.mask != 0
        loss = torch.where(is_said, apart, 0.0).sum() / max(self.counts.tokens, 1)
        with torch.no_grad():
            logprobs = token_logprobs(output, row.targets, vocab_size=self.vocab_size)
        sums = {"loss": loss, "tokens": is_said.sum(), "nll": -torch.where(is_said, logprobs, 0.0).sum()}
        return loss, Totals.of(SFT, sums)

    def metrics(self, totals: Totals) -> dict[str, float]:
        return sft_metrics(totals)
