"""Masks of tokens that are too far from the behaviour policy. Nothing here has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from learner.losses.choices import OffPolicySequenceMask, TotalVariationMask, TrustMask, Veto
from learner.losses.ratios import clamped
from learner.losses.tokens import Tokens

_NEVER_ZERO = 1e-8
"""Added to the probability of all other tokens, which may be 0."""


def trusted(masks: Sequence[TrustMask], tokens: Tokens) -> Tensor:
    """Return the tokens that every mask keeps."""
    kept = tokens.segments.trained
    for mask in masks:
        match mask:
            case TotalVariationMask(high=high, low=low):
                fell, rose = beyond("tv", tokens, low=low, high=high)
                kept = kept & ~(fell | rose)
            case OffPolicySequenceMask(delta=delta):
                lost = tokens.segments.means(-tokens.moved) > delta
                kept = kept & ~(tokens.segments.spread(lost) & (tokens.advantages < 0))
    return kept


def beyond(divergence: Literal["tv", "kl"], tokens: Tokens, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that became too unlikely and too likely, respectively, in the direction of their advantage."""
    now, then = tokens.now.exp(), tokens.behaviour.exp()
    if divergence == "tv":
        distance = (now - then).abs()
    else:
        others_now, others_then = ((1 - each).clamp(min=0) + _NEVER_ZERO for each in (now, then))
        distance = then * -tokens.moved + (1 - then) * (others_then / others_now).log()
    raised = tokens.advantages > 0
    return ~raised & (now < then) & (distance > low), raised & (now > then) & (distance > high)


def vetoed(veto: Veto | None, tokens: Tokens) -> Tensor:
    """Return the vetoed sequences, [S]."""
    if veto is None:
        return torch.zeros_like(tokens.segments.trained_tokens, dtype=torch.bool)
    fallen = clamped(tokens.moved).exp() < veto.min_ratio
    return tokens.segments.sums(fallen.to(torch.int64)) > 0
