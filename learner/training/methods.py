"""The training methods: forward passes of other models over a step's rows, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from async_rl.config.training import DistillSection, DpoConfig
from async_rl.megatron.logprobs import token_logprobs
from learner.model import FrozenModel
from learner.step import RowLoss, map_outputs
from learner.training.distillation import DistillationRowLoss
from learner.training.packed import ExampleCounts, TextRow
from learner.training.preferences import DpoRowLoss, RewardModelRowLoss
from learner.training.supervised import SupervisedRowLoss


class Method(Protocol):
    def prepared(self, rows: Sequence[TextRow]) -> Sequence[TextRow]:
        """Return the rows with the outputs of other models. Collective."""
        ...

    def loss(self, counts: ExampleCounts) -> RowLoss[TextRow]:
        """Return the loss of an update with these counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    vocab_size: int

    def prepared(self, rows: Sequence[TextRow]) -> Sequence[TextRow]:
        return rows

    def loss(self, counts: ExampleCounts) -> RowLoss[TextRow]:
        return SupervisedRowLoss(vocab_size=self.vocab_size, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    def prepared(self, rows: Sequence[TextRow]) -> Sequence[TextRow]:
        return rows

    def loss(self, counts: ExampleCounts) -> RowLoss[TextRow]:
        return RewardModelRowLoss(counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dpo:
    config: DpoConfig
    reference: FrozenModel

    def prepared(self, rows: Sequence[TextRow]) -> Sequence[TextRow]:
        seen = map_outputs(self.reference.chunks, rows, self._logprobs)
        # ranks without the last layers get no outputs and compute no loss
        return [replace(row, reference=each) for row, each in zip(rows, seen, strict=True)] if seen else rows

    def loss(self, counts: ExampleCounts) -> RowLoss[TextRow]:
        return DpoRowLoss(config=self.config, vocab_size=self.reference.shape.vocab_size, counts=counts)

    def _logprobs(self, row: TextRow, output: Tensor) -> Tensor:
        return token_logprobs(output, row.targets, vocab_size=self.reference.shape.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distill:
    config: DistillSection
    teacher: FrozenModel

    def prepared(self, rows: Sequence[TextRow]) -> Sequence[TextRow]:
        return rows

    def loss(self, counts: ExampleCounts) -> RowLoss[TextRow]:
        return DistillationRowLoss(
            teacher=self._logits,
            direction=self.config.direction,
            temperature=self.config.temperature,
            vocab_size=self.teacher.shape.vocab_size,
            counts=counts,
        )

    def _logits(self, row: TextRow) -> Tensor:
        (logits,) = map_outputs(self.teacher.chunks, [row], lambda _, output: output)
        return logits
