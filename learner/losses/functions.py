"""The loss functions: packed tensors in, a differentiable scalar and mergeable totals out.

    c current   b behaviour   p proximal   q reference    log-probabilities of the sampled tokens, [T]
    A advantage   V value   G return   H entropy          [T]; only c, V and H have a gradient
    r = exp(c - anchor), anchor = b or p                  bounded by the surrogate
    w = exp(p - b)                                        weighted by a correction, if the anchor is p
    rho = exp(c - b)                                      used by masks, veto and diagnostics

    policy         sum share * (kept * v(w) * surrogate(r, A, c) + beta * kl(c - q) - alpha * H)
    value          sum share * max((V - G)^2, (V_old + clip(V - V_old) - G)^2) / 2
    sft            sum share * -c
    dpo            mean over pairs of -log sigmoid(beta * (d_chosen - d_rejected)), d = sum of c - q over an answer
    reward model   mean over pairs of -log sigmoid(s_chosen - s_rejected)

Log-ratios of tokens are clamped to +-20 before exp(), and flat outside. Sequences are delimited by cu_seqlens, [S + 1].
A token's `share` is 1 / (trained tokens of the step), or as the aggregation says (aggregation.py); each call returns its part
of the step's loss, so the parts add up however a step is divided. All functions compute in the dtype of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rl.config.training import DpoConfig
from learner.losses.aggregation import Normaliser, StepCounts, token_shares
from learner.losses.choices import TokenMean
from learner.losses.config import PolicyLossConfig, ValueLossConfig
from learner.losses.corrections import correction_weights
from learner.losses.diagnostics import measure
from learner.losses.ratios import kl_penalty, loglinear_proximal
from learner.losses.reports import DPO, REWARD_MODEL, SFT, VALUE
from learner.losses.segments import Segments
from learner.losses.surrogates import token_losses
from learner.losses.tokens import Tokens
from learner.losses.totals import Totals
from learner.losses.trust import trusted, vetoed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """What a loss function returns for one packed row."""

    loss: Tensor
    totals: Totals
    """Totals of this row; merge those of all rows before reading metrics."""

    @property
    def metrics(self) -> dict[str, float]:
        return self.totals.metrics


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
    normaliser: Normaliser = None,
) -> Loss:
    """Compute the policy loss of one packed row.

    `entropy`: entropy of the distribution each token was sampled from, with its gradient. `ages`: version being trained minus
    the version that sampled the token; it splits the diagnostics, and `proximal_source: loglinear` needs it. `normaliser`:
    counts or denominator of the whole step. Raises ValueError for a missing tensor that the config needs.
    """
    segments = Segments.of(mask, cu_seqlens)
    share = token_shares(config.aggregation, segments, normaliser=normaliser, dtype=current.dtype, group_ids=group_ids)
    c, b, A = segments.only(current), segments.only(behaviour.detach()), segments.only(advantages.detach())
    if config.anchor == "behaviour":
        anchor = b
    elif config.proximal_source == "loglinear":
        anchor = loglinear_proximal(c, b, _given(ages, "ages", "proximal_source: loglinear"))
    else:
        anchor = segments.only(_given(proximal, "proximal", "anchor: proximal").detach())
    tokens = Tokens(current=c, behaviour=b, anchor=anchor, advantages=A, segments=segments)

    surrogate = token_losses(config.surrogate, tokens)
    v, corrected = correction_weights(config.correction, tokens)
    is_vetoed = vetoed(config.veto, tokens)
    kept = trusted(config.trust_mask, tokens) & ~segments.spread(is_vetoed)
    zero = c.new_zeros(())
    parts = {"surrogate": (share * torch.where(kept, v * surrogate.losses, 0.0)).sum(), "kl_reference": zero, "entropy": zero}
    if config.kl.coefficient > 0 or reference is not None:
        q = segments.only(_given(reference, "reference", "kl").detach())
        parts["kl_reference"] = (share * kl_penalty(config.kl, c, q)).sum()
    if config.entropy_coefficient > 0 or entropy is not None:
        H = segments.only(_given(entropy, "entropy", "entropy_coefficient"))
        parts["entropy"] = (share * H).sum()
    loss = parts["surrogate"] + config.kl.coefficient * parts["kl_reference"] - config.entropy_coefficient * parts["entropy"]

    totals = measure(
        tokens, parts=parts | {"loss": loss}, surrogate=surrogate, weights=v, corrected=corrected, kept=kept,
        is_vetoed=is_vetoed, ages=ages,
    )  # fmt: skip
    return Loss(loss=loss, totals=totals)


def value_loss(
    config: ValueLossConfig,
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    normaliser: Normaliser = None,
) -> Loss:
    """Compute the critic's loss. `old_values`: values before the step's first update."""
    segments = Segments.of(mask, cu_seqlens)
    share = token_shares(TokenMean(), segments, normaliser=normaliser, dtype=values.dtype)
    V, V_old, G = segments.only(values), segments.only(old_values.detach()), segments.only(returns.detach())
    free = held = (V - G).square()
    if config.clip is not None:
        held = (V_old + (V - V_old).clamp(-config.clip, config.clip) - G).square()
    loss = (share * torch.maximum(free, held) / 2).sum()
    error = (G - V).double()
    sums = {
        "loss": loss, "tokens": segments.trained.sum(), "clipped": (held > free).sum(), "values": V.sum(),
        "returns": G.sum(), "returns_squared": G.double().square().sum(),
        "errors": error.sum(), "errors_squared": error.square().sum(),
    }  # fmt: skip
    return Loss(loss=loss, totals=Totals.of(VALUE, sums))


def sft_loss(current: Tensor, mask: Tensor, *, normaliser: Normaliser = None) -> Loss:
    """Compute the mean negative log-likelihood of the trained tokens; `normaliser` as in `policy_loss`."""
    c, tokens = torch.where(mask != 0, current, 0.0), (mask != 0).sum()
    loss = -c.sum() / _divisor(normaliser.tokens if isinstance(normaliser, StepCounts) else normaliser, int(tokens))
    return Loss(loss=loss, totals=Totals.of(SFT, {"loss": loss, "tokens": tokens, "nll": -c.sum()}))


def sequence_logprobs(logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over trained tokens and their number, for each sequence, [S]."""
    segments = Segments.of(mask, cu_seqlens)
    return segments.sums(segments.only(logprobs)), segments.trained_tokens


def dpo_loss(
    config: DpoConfig,
    chosen: Tensor,
    chosen_reference: Tensor,
    rejected: Tensor,
    rejected_reference: Tensor,
    *,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
    normaliser: float | None = None,
) -> Loss:
    """Compute the DPO loss of [P] pairs from each answer's summed log-probability (`sequence_logprobs`).

    `normaliser`: pairs of the whole step. `length_normalised` and `nll_coefficient` need the numbers of tokens.
    """
    d_chosen, d_rejected = chosen - chosen_reference.detach(), rejected - rejected_reference.detach()
    if config.length_normalised:
        d_chosen = d_chosen / _given(chosen_tokens, "chosen_tokens", "length_normalised").clamp(min=1)
        d_rejected = d_rejected / _given(rejected_tokens, "rejected_tokens", "length_normalised").clamp(min=1)
    margin = d_chosen - d_rejected
    if config.variant == "ipo":
        losses = (margin - 1 / (2 * config.beta)).square()
    else:
        smoothing = config.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(config.beta * margin) - smoothing * logsigmoid(-config.beta * margin)
    nll = torch.zeros_like(chosen)
    if config.nll_coefficient > 0:
        nll = -chosen / _given(chosen_tokens, "chosen_tokens", "nll_coefficient").clamp(min=1)
    loss = (losses + config.nll_coefficient * nll).sum() / _divisor(normaliser, len(chosen))
    sums = {
        "loss": loss, "pairs": torch.ones_like(margin).sum(), "right": (margin > 0).sum(), "nll": nll.sum(),
        "chosen": config.beta * d_chosen.sum(), "rejected": config.beta * d_rejected.sum(),
    }  # fmt: skip
    return Loss(loss=loss, totals=Totals.of(DPO, sums))


def reward_model_loss(chosen_scores: Tensor, rejected_scores: Tensor, *, normaliser: float | None = None) -> Loss:
    """Compute the Bradley-Terry loss of [P] pairs. `normaliser`: pairs of the whole step."""
    margin = chosen_scores - rejected_scores
    loss = -logsigmoid(margin).sum() / _divisor(normaliser, len(margin))
    sums = {
        "loss": loss, "pairs": torch.ones_like(margin).sum(), "right": (margin > 0).sum(),
        "chosen": chosen_scores.sum(), "rejected": rejected_scores.sum(),
    }  # fmt: skip
    return Loss(loss=loss, totals=Totals.of(REWARD_MODEL, sums))


def _divisor(normaliser: float | None, count: int) -> float:
    return max(float(count if normaliser is None else normaliser), 1.0)


def _given(tensor: Tensor | None, name: str, asked_by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the loss uses {asked_by}, so `{name}` must be given")
    return tensor
