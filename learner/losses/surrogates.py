"""The surrogate loss of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.losses.choices import Cispo, Dppo, Gspo, Importance, PpoClip, Reinforce, Sapo, Surrogate, Topr
from learner.losses.ratios import clamped
from learner.losses.tokens import Tokens
from learner.losses.trust import beyond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    losses: Tensor
    below: Tensor
    """Tokens whose ratio was limited by a lower bound."""
    above: Tensor
    """Tokens whose ratio was limited by an upper bound."""


def token_losses(surrogate: Surrogate, tokens: Tokens) -> TokenLosses:
    """Compute the surrogate of each token; formulas in choices.py."""
    current, advantages = tokens.current, tokens.advantages
    log_ratio = current - tokens.anchor
    ratio = clamped(log_ratio).exp()
    held = ratio.detach()
    match surrogate:
        case PpoClip(clip_low=low, clip_high=high, dual_clip=dual_clip):
            return _clipped(ratio, advantages, low, high, dual_clip)
        case Gspo(clip_low=low, clip_high=high):
            of_sequence = clamped(tokens.segments.means(log_ratio)).exp()
            return _clipped(tokens.segments.spread(of_sequence), advantages, low, high)
        case Cispo(cap=cap, floor=floor):
            losses = -held.clamp(floor, cap) * advantages * current
            return TokenLosses(losses=losses, below=held < floor, above=held > cap)
        case Dppo(divergence=divergence, low=low, high=high):
            fell, rose = beyond(divergence, tokens, low=low, high=high)
            return TokenLosses(losses=torch.where(fell | rose, 0.0, -ratio * advantages), below=fell, above=rose)
        case Sapo(tau_positive=positive, tau_negative=negative):
            tau = torch.full_like(held, negative).masked_fill(advantages > 0, positive)
            return _unbounded(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages)
        case Topr(cap=cap):
            above = (advantages <= 0) & (held > cap)
            weights = held.clamp(max=cap).masked_fill(advantages > 0, 1.0)
            return TokenLosses(losses=-weights * advantages * current, below=torch.zeros_like(above), above=above)
        case Importance():
            return _unbounded(-ratio * advantages)
        case Reinforce():
            return _unbounded(-advantages * current)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> TokenLosses:
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    losses, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        too_much = (advantages < 0) & (losses > ceiling)
        losses, clipped = torch.where(too_much, ceiling, losses), clipped | too_much
    return TokenLosses(losses=losses, below=clipped & (ratio < 1), above=clipped & (ratio > 1))


def _unbounded(losses: Tensor) -> TokenLosses:
    nowhere = torch.zeros_like(losses, dtype=torch.bool)
    return TokenLosses(losses=losses, below=nowhere, above=nowhere)
