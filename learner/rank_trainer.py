"""What one rank does with its part of a step: look with the models that must be asked first, then update.

rows ──look──▶ proximal, reference ──▶ for each epoch, for each minibatch: update ──▶ one result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.config import BatchConfig
from learner.batch import Portion
from learner.losses import StepCounts
from learner.model import TrainingModel
from learner.objective import Objective
from learner.policy_update import PolicyUpdate, Reader
from learner.rows import Row
from learner.step import StepResult, look, train_step


class RankTrainer:
    def __init__(self, model: TrainingModel, objective: Objective, batch: BatchConfig, read: Reader):
        self.model = model
        self._objective, self._epochs, self._read = objective, batch.epochs, read

    def step(self, portions: Sequence[Portion]) -> StepResult:
        """One update for each portion, as often as there are epochs. Every rank of the learner must call it."""
        updates = [
            _Update(
                rows=[Row.on_device(each, self.model.device) for each in portion.bins],
                counts=portion.counts.to(self.model.device),
            )
            for portion in portions
        ]
        if self._objective.policy_loss.anchor == "proximal" and len(updates) * self._epochs > 1:
            updates = [self._with_proximal(update) for update in updates]
        return _combined(
            [train_step(self.model, self._loss(update), update.rows) for _ in range(self._epochs) for update in updates]
        )

    def _with_proximal(self, update: _Update) -> _Update:
        seen = look(self.model.ddp, update.rows, self._read)
        if not seen:  # the last layers are elsewhere, and with them the loss
            return update
        return replace(update, rows=[replace(row, proximal=each) for row, each in zip(update.rows, seen, strict=True)])

    def _loss(self, update: _Update) -> PolicyUpdate:
        return PolicyUpdate(config=self._objective.policy_loss, counts=update.counts, read=self._read)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Update:
    rows: list[Row]
    counts: StepCounts


def _combined(results: Sequence[StepResult]) -> StepResult:
    """Of several updates: the mean of what they report. Only where none of them took place is the step skipped."""
    if len(results) == 1:
        return results[0]
    done = [each for each in results if not each.skipped]
    reported = done if done else results
    names = reported[0].metrics.keys()
    return StepResult(
        loss=sum(each.loss for each in reported) / len(reported),
        grad_norm=max(each.grad_norm for each in reported),
        learning_rate=reported[-1].learning_rate,
        skipped=not done,
        metrics={name: _merged(name, [each.metrics[name] for each in reported]) for name in names}
        | {"policy/skipped_updates": float(len(results) - len(done))},
    )


def _merged(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)
