"""The policy loss of one packed row: logits to log-probabilities of the sampled tokens, and those into the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from async_rl.config.rollout import SamplingConfig
from async_rl.megatron.logprobs import token_logprobs, token_logprobs_and_entropies
from learner.batches.device_rows import DeviceRow
from learner.losses import Loss
from learner.losses.aggregation import StepCounts
from learner.losses.diagnostics import POLICY, policy_metrics
from learner.losses.totals import TotalNames, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobReader:
    """Computes log-probabilities of the targets from logits, with the sampler's temperature, top-k and top-p."""

    vocab_size: int
    sampling: SamplingConfig

    def __call__(self, row: DeviceRow, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the row's targets, [T]."""
        return token_logprobs(logits, row.targets, **self._processing)

    def with_entropies(self, row: DeviceRow, logits: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropies(logits, row.targets, **self._processing)

    @property
    def _processing(self) -> dict[str, Any]:
        sampling = self.sampling
        return {
            "vocab_size": self.vocab_size,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyRowLoss:
    """A RowLoss over logits."""

    loss: Callable[..., Loss]
    """Called with the arguments of `policy_loss` after its config."""
    counts: StepCounts
    """Counts of the whole update."""
    read: LogprobReader
    entropy: Literal["unknown", "measured", "trained"]
    """Entropy of the whole distributions: not computed, passed to the loss detached, or passed with its gradient."""

    @property
    def names(self) -> TotalNames:
        return POLICY

    def __call__(self, row: DeviceRow, output: Tensor) -> tuple[Tensor, Totals]:
        current, entropy = self._read(row, output)
        made = self.loss(
            current=current,
            behaviour=row.behaviour,
            advantages=row.advantages,
            mask=row.mask,
            cu_seqlens=row.cu_seqlens,
            # in a step's first and only update the proximal policy equals the current one
            proximal=row.proximal if row.proximal is not None else current.detach(),
            reference=row.reference,
            entropy=entropy,
            ages=row.ages,
            group_ids=row.group_ids,
            normaliser=self.counts,
        )
        return made.loss, made.totals

    def _read(self, row: DeviceRow, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.entropy == "unknown":
            return self.read(row, logits), None
        current, entropy = self.read.with_entropies(row, logits)
        return current, entropy if self.entropy == "trained" else entropy.detach()

    def metrics(self, totals: Totals) -> dict[str, float]:
        return {f"policy/{name}": value for name, value in policy_metrics(totals).items()}
