"""The policy's loss of one row: logits to log-probabilities of what was sampled, and these into the objective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from async_rl.megatron.logprobs import token_logprobs
from async_rl.rollout_config import SamplingConfig
from learner.diagnostics import POLICY, policy_metrics
from learner.losses import PolicyLossConfig, StepCounts, policy_loss
from learner.rows import Row
from learner.totals import Names, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads the log-probabilities of the targets from logits, as the sampler would have computed them."""

    vocab_size: int
    sampling: SamplingConfig

    def __call__(self, row: Row, logits: Tensor) -> Tensor:
        return token_logprobs(
            logits,
            row.targets,
            vocab_size=self.vocab_size,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyUpdate:
    """A RowLoss."""

    config: PolicyLossConfig
    counts: StepCounts
    """Of the update."""
    read: Reader

    @property
    def names(self) -> Names:
        return POLICY

    def __call__(self, row: Row, output: Tensor) -> tuple[Tensor, Totals]:
        current = self.read(row, output)
        # before a step's only update the policy is the one that is being differentiated
        proximal = row.proximal if row.proximal is not None else current.detach()
        made = policy_loss(
            self.config,
            current=current,
            behaviour=row.behaviour,
            advantages=row.advantages,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            proximal=proximal,
            reference=row.reference,
            ages=row.ages,
            group_ids=row.group_ids,
            normaliser=self.counts,
        )
        return made.loss, made.totals

    def metrics(self, totals: Totals) -> dict[str, float]:
        return {f"policy/{name}": value for name, value in policy_metrics(totals).items()}
