"""Losses of preference pairs: DPO, and reward models.

In a row the texts of pairs alternate: chosen, rejected, chosen, rejected. A filler row has a single text, and so no pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from async_rl.config.training import DpoConfig
from async_rl.megatron.logprobs import token_logprobs
from learner.losses import dpo_loss, reward_model_loss, sequence_logprobs
from learner.losses.reports import DPO, REWARD_MODEL, dpo_metrics, reward_model_metrics
from learner.losses.totals import TotalNames, Totals
from learner.training.packed import ExampleCounts, TextRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoRowLoss:
    """A RowLoss over logits. Rows have a reference."""

    config: DpoConfig
    vocab_size: int
    counts: ExampleCounts
    """Counts of the whole update."""

    @property
    def names(self) -> TotalNames:
        return DPO

    def __call__(self, row: TextRow, output: Tensor) -> tuple[Tensor, Totals]:
        assert row.reference is not None
        current = token_logprobs(output, row.targets, vocab_size=self.vocab_size)
        logprobs, lengths = sequence_logprobs(current, row.mask, row.cu_seqlens)
        reference_logprobs, _ = sequence_logprobs(row.reference, row.mask, row.cu_seqlens)
        (chosen, rejected), (chosen_reference, rejected_reference) = _pairs(logprobs), _pairs(reference_logprobs)
        chosen_tokens, rejected_tokens = _pairs(lengths)
        made = dpo_loss(
            self.config,
            chosen,
            chosen_reference,
            rejected,
            rejected_reference,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            normaliser=self.counts.examples,
        )
        return made.loss, made.totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        return dpo_metrics(totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelRowLoss:
    """A RowLoss over scores, [T, 1]. A text's score is that of its last token."""

    counts: ExampleCounts
    """Counts of the whole update."""

    @property
    def names(self) -> TotalNames:
        return REWARD_MODEL

    def __call__(self, row: TextRow, output: Tensor) -> tuple[Tensor, Totals]:
        last = row.cu_seqlens[1:].long() - 1
        chosen, rejected = _pairs(output[:, 0].float()[last])
        made = reward_model_loss(chosen, rejected, normaliser=self.counts.examples)
        return made.loss, made.totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        return reward_model_metrics(totals)


def _pairs(per_text: Tensor) -> tuple[Tensor, Tensor]:
    paired = per_text[: len(per_text) // 2 * 2]
    return paired[0::2], paired[1::2]
