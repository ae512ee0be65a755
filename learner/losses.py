"""The policy loss over packed rows: tensors in, a differentiable scalar and mergeable totals out.

    c current   b behaviour   p proximal   q reference   (log-probabilities of the sampled tokens, [T])
    r = exp(c - anchor)       rho = exp(c - b)           sequences are delimited by cu_seqlens, [S + 1]

Splitting a step into micro-batches and ranks changes nothing: every call returns a sum of numerators over the
denominator of the *whole step* (`normaliser`), so that losses and gradients of the parts add up to the whole. What a mask
or a veto removes leaves the numerator and stays in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.diagnostics import measure, policy_metrics
from learner.loss_config import (
    Aggregation,
    Cispo,
    Importance,
    Kl,
    PolicyLossConfig,
    PpoClip,
    PromptMean,
    SequenceMeanTokenMean,
    SequenceSumNorm,
    Surrogate,
    TokenMean,
    TotalVariationMask,
    Veto,
)
from learner.totals import Totals

__all__ = ["PolicyLoss", "PolicyLossConfig", "StepCounts", "count", "policy_loss"]

MAX_LOG_RATIO = 20.0
"""Beyond it exp() leaves float32's useful range; the gradient is zero there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    loss: Tensor
    totals: Totals
    """Of this micro-batch; those of several are merged before they are read."""

    @property
    def metrics(self) -> dict[str, float]:
        return policy_metrics(self.totals)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCounts:
    """What an optimizer step divides by: counted once, over all its micro-batches and ranks, before the first of them runs.

    Sequences and groups without a trained token are not counted.
    """

    tokens: int
    sequences: int
    groups: Tensor
    """The ids of the groups, ascending."""
    group_tokens: Tensor
    """Trained tokens of each."""

    def to(self, device: torch.device) -> StepCounts:
        return replace(self, groups=self.groups.to(device), group_tokens=self.group_tokens.to(device))

    def normaliser(self, aggregation: Aggregation) -> float:
        if isinstance(aggregation, TokenMean):
            return float(self.tokens)
        if isinstance(aggregation, PromptMean):
            return float(len(self.groups))
        if isinstance(aggregation, SequenceSumNorm):
            return float(self.sequences * aggregation.length)
        return float(self.sequences)


def count(*, mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor | None = None) -> StepCounts:
    """The counts of a batch given as one packed row. `group_ids` has one entry per sequence (or per token)."""
    rows = _Rows(mask=mask, cu_seqlens=cu_seqlens, group_ids=group_ids)
    return rows.counts()


def policy_loss(
    config: PolicyLossConfig,
    *,
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    ages: Tensor | None = None,
    group_ids: Tensor | None = None,
    normaliser: StepCounts | float | None = None,
) -> PolicyLoss:
    """`normaliser`: the counts of the whole step; or its denominator as a number; or nothing, when this is the whole step.

    With `prompt_mean`, a number can only be right where each group is whole inside one micro-batch: give the counts.
    """
    rows = _Rows(mask=mask, cu_seqlens=cu_seqlens, group_ids=group_ids)
    counts = normaliser if isinstance(normaliser, StepCounts) else rows.counts()
    divisor = normaliser if isinstance(normaliser, int | float) else counts.normaliser(config.aggregation)
    weights = rows.token_weights(config.aggregation, counts, current.dtype) / (divisor if divisor > 0 else 1.0)

    # what is not trained on never enters: neither padding's garbage nor its gradient
    trained = rows.trained
    current, behaviour, advantages = (torch.where(trained, each, 0.0) for each in (current, behaviour, advantages.detach()))
    moved = current.detach() - behaviour
    kept = trained & _trusted(config.trust_mask, current.detach(), behaviour, advantages)
    kept, vetoed = _without_vetoed(config.veto, rows, kept, moved)

    anchor = behaviour if config.anchor == "behaviour" else _given(proximal, "proximal", "anchor: proximal")
    log_ratio = torch.where(trained, current - anchor.detach(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_losses, clipped = _surrogate(config.surrogate, current, log_ratio.exp(), advantages)
    surrogate = (torch.where(kept, token_losses, 0.0) * weights).sum()
    kl = current.new_zeros(())
    if config.kl.coefficient > 0:
        kl = (_kl(config.kl, current, torch.where(trained, _given(reference, "reference", "kl").detach(), 0.0)) * weights).sum()
    bonus = current.new_zeros(())
    if config.entropy_coefficient > 0:
        bonus = (torch.where(trained, _given(entropy, "entropy", "entropy_coefficient"), 0.0) * weights).sum()
    loss = surrogate + config.kl.coefficient * kl - config.entropy_coefficient * bonus
    totals = measure(
        trained=trained, kept=kept, clipped=clipped & kept, moved=moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        current=current.detach(), loss=loss, surrogate=surrogate, kl=kl, entropy=bonus,
        num_sequences=rows.num_trained_sequences, num_vetoed=vetoed,
    )  # fmt: skip
    return PolicyLoss(loss=loss, totals=totals)


def _given(tensor: Tensor | None, name: str, asked_by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the loss asks for {asked_by}, so `{name}` must be given")
    return tensor


def _surrogate(surrogate: Surrogate, current: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, and where a bound took hold."""
    if isinstance(surrogate, PpoClip):
        return _ppo_clip(surrogate, ratio, advantages)
    if isinstance(surrogate, Cispo):
        bounded = ratio.detach().clamp(surrogate.floor, surrogate.cap)
        return -bounded * advantages * current, bounded != ratio.detach()
    if isinstance(surrogate, Importance):
        return -ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
    return -advantages * current, torch.zeros_like(ratio, dtype=torch.bool)


def _ppo_clip(surrogate: PpoClip, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high) * advantages
    losses, clipped = torch.maximum(free, bounded), bounded > free
    if surrogate.dual_clip is not None:
        ceiling = -surrogate.dual_clip * advantages
        too_much = (advantages < 0) & (losses > ceiling)
        losses, clipped = torch.where(too_much, ceiling, losses), clipped | too_much
    return losses, clipped.detach()


def _trusted(trust_mask: TotalVariationMask | None, current: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    if trust_mask is None:
        return torch.ones_like(current, dtype=torch.bool)
    moved = current.exp() - behaviour.exp()
    return ~torch.where(advantages > 0, moved > trust_mask.high, moved < -trust_mask.low)


def _without_vetoed(veto: Veto | None, rows: _Rows, kept: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens kept, and the number of sequences removed."""
    if veto is None:
        return kept, kept.new_zeros((), dtype=torch.int64)
    fallen = rows.trained & (moved.exp() < veto.min_ratio)
    is_vetoed = rows.sum_per_sequence(fallen.to(torch.int64)) > 0
    return kept & ~is_vetoed[rows.sequence], is_vetoed.sum()


def _kl(kl: Kl, current: Tensor, reference: Tensor) -> Tensor:
    distance = (current - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kl.estimator == "k1":
        estimate = distance
    elif kl.estimator == "k2":
        estimate = distance.square() / 2
    else:
        estimate = torch.exp(-distance) + distance - 1
    return estimate * torch.exp(current - current.detach()) if kl.unbiased else estimate


class _Rows:
    """Which token belongs to which sequence, and which are trained on."""

    def __init__(self, *, mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor | None):
        self.trained = mask != 0
        lengths = cu_seqlens.diff().to(torch.int64)
        self.num_sequences = len(lengths)
        self.sequence = torch.repeat_interleave(torch.arange(self.num_sequences, device=mask.device), lengths)
        if len(self.sequence) != len(mask):
            raise ValueError(f"cu_seqlens ends at {len(self.sequence)}, but there are {len(mask)} tokens")
        self.trained_tokens = self.sum_per_sequence(self.trained.to(torch.int64))
        self._groups = self._per_sequence(group_ids, cu_seqlens)

    @property
    def num_trained_sequences(self) -> Tensor:
        return (self.trained_tokens > 0).sum()

    def sum_per_sequence(self, per_token: Tensor) -> Tensor:
        return per_token.new_zeros(self.num_sequences).index_add(0, self.sequence, per_token)

    def counts(self) -> StepCounts:
        groups, index = torch.unique(self._groups, return_inverse=True)
        tokens = self.trained_tokens.new_zeros(len(groups)).index_add(0, index, self.trained_tokens)
        return StepCounts(
            tokens=int(self.trained_tokens.sum()),
            sequences=int(self.num_trained_sequences),
            groups=groups[tokens > 0],
            group_tokens=tokens[tokens > 0],
        )

    def token_weights(self, aggregation: Aggregation, counts: StepCounts, dtype: torch.dtype) -> Tensor:
        """What each trained token counts in the numerator; 0 where not trained."""
        weights = self.trained.to(dtype)
        if isinstance(aggregation, SequenceMeanTokenMean):
            weights = weights / self.trained_tokens.clamp(min=1)[self.sequence].to(dtype)
        if isinstance(aggregation, PromptMean) and len(counts.groups):
            place = torch.searchsorted(counts.groups, self._groups).clamp(max=len(counts.groups) - 1)
            weights = weights / counts.group_tokens[place][self.sequence].to(dtype)
        return weights

    def _per_sequence(self, group_ids: Tensor | None, cu_seqlens: Tensor) -> Tensor:
        if group_ids is None:
            return torch.arange(self.num_sequences, device=self.trained.device)
        if len(group_ids) == self.num_sequences:
            return group_ids
        if len(group_ids) != len(self.sequence):
            raise ValueError(f"group_ids has {len(group_ids)} entries for {self.num_sequences} sequences")
        return group_ids[cu_seqlens[:-1].long().clamp(max=max(len(group_ids) - 1, 0))]
