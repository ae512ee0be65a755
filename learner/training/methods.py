"""The training methods: forward passes of other models over a step's rows, and the loss of a row.

In a row the texts of pairs alternate: chosen, rejected, chosen, rejected. A filler row has a single text, and so no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from async_rl.config.training import DistillSection, DpoConfig
from async_rl.megatron.heads.divergence import divergence
from async_rl.megatron.heads.logprobs import token_logprobs
from async_rl.megatron.heads.packed_output import PackedOutput
from learner.batches.device_rows import ModelRow
from learner.losses.functions import Loss, dpo_loss, reward_model_loss, sequence_logprobs, sft_loss
from learner.losses.reports import DPO, REWARD_MODEL, SFT
from learner.losses.totals import TotalNames, Totals
from learner.model import FrozenModel, Reference
from learner.step import map_outputs
from learner.training.packed import ExampleCounts


class Method(Protocol):
    names: TotalNames
    """Names of the loss's totals."""

    def prepared(self, rows: Sequence[ModelRow]) -> Sequence[ModelRow]:
        """Return the rows with the outputs of other models. Collective."""
        return rows

    def loss(self, row: ModelRow, output: PackedOutput, counts: ExampleCounts) -> Loss:
        """Return the row's share of the loss of an update with these counts, from the output of the model's last layer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised(Method):
    """Mean negative log-likelihood of the trained tokens."""

    names = SFT

    def loss(self, row: ModelRow, output: PackedOutput, counts: ExampleCounts) -> Loss:
        current = token_logprobs(output, row.targets)
        return sft_loss(current, row.mask, normaliser=counts.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel(Method):
    """Scores of pairs, [T, 1]. A text's score is that of its last token."""

    names = REWARD_MODEL

    def loss(self, row: ModelRow, output: PackedOutput, counts: ExampleCounts) -> Loss:
        last = row.cu_seqlens[1:].long() - 1
        chosen, rejected = _pairs(output.values()[last])
        return reward_model_loss(chosen, rejected, normaliser=counts.examples)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dpo(Method):
    config: DpoConfig
    reference: Reference
    names = DPO

    def prepared(self, rows: Sequence[ModelRow]) -> Sequence[ModelRow]:
        with self.reference.evaluated() as chunks:
            seen = map_outputs(chunks, rows, self._logprobs)
        # ranks without the last layers get no outputs and compute no loss
        return [replace(row, reference=each) for row, each in zip(rows, seen, strict=True)] if seen else rows

    def loss(self, row: ModelRow, output: PackedOutput, counts: ExampleCounts) -> Loss:
        assert row.reference is not None
        logprobs, lengths = sequence_logprobs(self._logprobs(row, output), row.mask, row.cu_seqlens)
        reference_logprobs, _ = sequence_logprobs(row.reference, row.mask, row.cu_seqlens)
        (chosen, rejected), (chosen_reference, rejected_reference) = _pairs(logprobs), _pairs(reference_logprobs)
        chosen_tokens, rejected_tokens = _pairs(lengths)
        return dpo_loss(
            self.config,
            chosen,
            chosen_reference,
            rejected,
            rejected_reference,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            normaliser=counts.examples,
        )

    def _logprobs(self, row: ModelRow, output: PackedOutput) -> Tensor:
        return token_logprobs(output, row.targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distill(Method):
    """The divergence from a teacher's whole distributions at each trained token."""

    config: DistillSection
    teacher: FrozenModel
    names = SFT

    def loss(self, row: ModelRow, output: PackedOutput, counts: ExampleCounts) -> Loss:
        (of_teacher,) = map_outputs(self.teacher.chunks, [row], lambda _, found: found)
        is_trained = row.mask != 0
        divergences = divergence(output, of_teacher, direction=self.config.direction, temperature=self.config.temperature)
        loss = torch.where(is_trained, divergences, 0.0).sum() / max(counts.tokens, 1)
        with torch.no_grad():
            logprobs = token_logprobs(output, row.targets)
        sums = {"loss": loss, "tokens": is_trained.sum(), "nll": -torch.where(is_trained, logprobs, 0.0).sum()}
        return Loss(loss=loss, totals=Totals.of(SFT, sums))


def _pairs(per_text: Tensor) -> tuple[Tensor, Tensor]:
    paired = per_text[: len(per_text) // 2 * 2]
    return paired[0::2], paired[1::2]
