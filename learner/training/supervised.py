"""Supervised fine-tuning: mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from async_rl.megatron.logprobs import token_logprobs
from learner.losses import sft_loss
from learner.losses.reports import SFT, sft_metrics
from learner.losses.totals import TotalNames, Totals
from learner.training.packed import ExampleCounts, TextRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRowLoss:
    """A RowLoss over logits."""

    vocab_size: int
    counts: ExampleCounts
    """Counts of the whole update."""

    @property
    def names(self) -> TotalNames:
        return SFT

    def __call__(self, row: TextRow, output: Tensor) -> tuple[Tensor, Totals]:
        current = token_logprobs(output, row.targets, vocab_size=self.vocab_size)
        made = sft_loss(current, row.mask, normaliser=self.counts.tokens)
        return made.loss, made.totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        return sft_metrics(totals)
