"""One rank's part of a training step: forward passes of the other models, advantages, then the updates.

rows ──▶ proximal, values, reference, teacher ──▶ advantages ──▶ for each epoch, for each minibatch: update ──▶ result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from async_rl.config import Config
from async_rl.config.learner import SharedCritic
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.heads.logprobs import token_logprobs, token_logprobs_and_entropies
from async_rl.megatron.heads.packed_output import PackedOutput
from async_rl.megatron.parallel import data_group
from learner.batches.batch import RankMinibatch
from learner.batches.device_rows import DeviceRow
from learner.batches.packed_rows import PackedRow
from learner.objective import Objective
from learner.ranks.model_set import ModelSet
from learner.ranks.token_advantages import assign_token_credit
from learner.row_losses import policy_row_loss, shared_row_loss, value_row_loss
from learner.step import RowLoss, StepResult, Update, evaluate_loss, map_outputs, update


class RankTrainer:
    def __init__(self, model_set: ModelSet, objective: Objective, config: Config):
        self._model_set, self._objective = model_set, objective
        self._epochs, self._critic = config.batch.epochs, config.learner.critic
        self._reads_entropy = objective.needs_entropy or config.learner.measure_entropy
        self._processing = config.sampling.model_dump(include={"temperature", "top_k", "top_p"})

    def step(self, minibatches: Sequence[RankMinibatch[PackedRow]]) -> StepResult:
        """Run one update per minibatch and epoch. Collective over all ranks."""
        device = self._model_set.policy.device
        rows = [DeviceRow.on_device(each, device) for minibatch in minibatches for each in minibatch.rows]
        rows = self._with_model_outputs(rows, num_updates=len(minibatches) * self._epochs)
        if parallel_state.is_pipeline_last_stage():  # only these ranks compute losses
            rows = assign_token_credit(rows, self._objective, data_group())
        remaining = iter(rows)
        prepared = [
            RankMinibatch(rows=[next(remaining) for _ in minibatch.rows], counts=minibatch.counts.to(device))
            for minibatch in minibatches
        ]
        done = [self._update(minibatch) for _ in range(self._epochs) for minibatch in prepared]
        policy_result = _reported("policy", [policy for policy, _ in done])
        if not self._reads_entropy:
            policy_result = replace(policy_result, metrics=_without("policy/entropy", policy_result.metrics))
        critic_updates = [critic for _, critic in done if critic is not None]
        if not critic_updates:
            return policy_result
        critic = _reported("value", critic_updates)
        beside = {"value/grad_norm": critic.grad_norm, "value/lr": critic.learning_rate}
        return replace(policy_result, metrics={**policy_result.metrics, **critic.metrics, **beside})

    # -- forward passes before the first update -------------------------------------------------------------------------------

    def _with_model_outputs(self, rows: list[DeviceRow], *, num_updates: int) -> list[DeviceRow]:
        """Add the outputs of all models before the step's first update, on the ranks that hold the last layers."""
        model_set, is_shared = self._model_set, isinstance(self._critic, SharedCritic)
        wants_proximal = self._objective.needs_proximal and (num_updates > 1 or self._objective.compares_pairs)

        def by_policy(row: DeviceRow, output: PackedOutput) -> DeviceRow:
            proximal = self._logprobs(row, output) if wants_proximal else None
            return replace(row, proximal=proximal, values=output.values() if is_shared else None)

        if wants_proximal or is_shared:
            rows = _mapped(model_set.policy.chunks, rows, by_policy)
        if model_set.critic is not None:
            rows = _mapped(model_set.critic.chunks, rows, lambda row, output: replace(row, values=output.values()))
        if model_set.reference is not None:
            with model_set.reference.evaluated() as chunks:
                rows = _mapped(chunks, rows, lambda row, output: replace(row, reference=self._logprobs(row, output)))
        if model_set.teacher is not None:
            rows = _mapped(
                model_set.teacher.chunks, rows, lambda row, output: replace(row, teacher=self._logprobs(row, output))
            )
        return rows

    # -- updating -------------------------------------------------------------------------------------------------------

    def _update(self, minibatch: RankMinibatch[DeviceRow]) -> tuple[Update, Update | None]:
        """Update the policy and, if separate, the critic."""
        policy, critic, loss = self._model_set.policy, self._model_set.critic, self._policy_loss(minibatch)
        if critic is None:
            return update(policy, loss, minibatch.rows), None
        if critic.updates < self._model_set.cold_updates:
            policy_result = Update(totals=evaluate_loss(policy.chunks, loss, minibatch.rows), grad_norm=0.0, learning_rate=0.0)
        else:
            policy_result = update(policy, loss, minibatch.rows)
        return policy_result, update(critic, self._value_loss(minibatch), minibatch.rows)

    def _policy_loss(self, minibatch: RankMinibatch[DeviceRow]) -> RowLoss[DeviceRow]:
        alone = policy_row_loss(self._objective.loss, minibatch.counts, self._read)
        if not isinstance(self._critic, SharedCritic):
            return alone
        return shared_row_loss(alone, self._value_loss(minibatch), coefficient=self._critic.coefficient)

    def _value_loss(self, minibatch: RankMinibatch[DeviceRow]) -> RowLoss[DeviceRow]:
        assert self._objective.value_loss is not None
        return value_row_loss(self._objective.value_loss, minibatch.counts)

    def _logprobs(self, row: DeviceRow, output: PackedOutput) -> Tensor:
        """Return the log-probabilities of the row's targets under the sampler's temperature, top-k and top-p, [T]."""
        return token_logprobs(output, row.targets, **self._processing)

    def _read(self, row: DeviceRow, output: PackedOutput) -> tuple[Tensor, Tensor | None]:
        """Return `_logprobs`, and entropies if they are wanted; they have a gradient only if they are trained."""
        if not self._reads_entropy:
            return self._logprobs(row, output), None
        current, entropy = token_logprobs_and_entropies(output, row.targets, **self._processing)
        return current, entropy if self._objective.needs_entropy else entropy.detach()


def _mapped(
    chunks: nn.ModuleList, rows: list[DeviceRow], see: Callable[[DeviceRow, PackedOutput], DeviceRow]
) -> list[DeviceRow]:
    found = map_outputs(chunks, rows, see)
    return found if parallel_state.is_pipeline_last_stage() else rows


def _without(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without one that was not measured: its sum is 0."""
    return {each: value for each, value in metrics.items() if each != name}


def _reported(part: str, updates: Sequence[Update]) -> StepResult:
    step = StepResult.of(updates)
    return replace(step, metrics={**step.metrics, f"{part}/skipped_updates": float(sum(each.skipped for each in updates))})
