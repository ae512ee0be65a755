"""The importance weight of each token from the behaviour to the proximal policy, w = exp(p - b)."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.losses.choices import Correction, Mask, NoCorrection, SequenceMask, Truncate
from learner.losses.ratios import clamped
from learner.losses.tokens import Tokens


def correction_weights(correction: Correction, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the weights, and a mask of those that were clipped or set to 0."""
    segments, log_weights = tokens.segments, tokens.anchor - tokens.behaviour
    raw = clamped(log_weights).exp()
    match correction:
        case NoCorrection():
            return torch.ones_like(raw), torch.zeros_like(segments.trained)
        case Truncate(level=level, low=low, high=high):
            weights = raw if level == "token" else segments.spread(clamped(segments.sums(log_weights)).exp())
            bounded = weights.clamp(low, high)
            return bounded, bounded != weights
        case Mask(low=low, high=high):
            inside = (low <= raw) & (raw <= high)
            return torch.where(inside, raw, 0.0), ~inside
        case SequenceMask(low=low, high=high):
            of_sequence = segments.means(log_weights) if correction.statistic == "geometric" else segments.sums(log_weights)
            statistic = segments.spread(clamped(of_sequence).exp())
            inside = (low <= statistic) & (statistic <= high)
            weights = {"raw": raw, "statistic": statistic, "one": torch.ones_like(raw)}[correction.weight]
            return torch.where(inside, weights, 0.0), ~inside
