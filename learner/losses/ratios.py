"""Log-ratios between policies, and divergences estimated from them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.losses.config import Kl

MAX_LOG_RATIO = 20.0
"""Beyond it exp() leaves float32's useful range; the gradient is zero there."""


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def divergence(estimator: Literal["k1", "k2", "k3"], log_ratio: Tensor) -> Tensor:
    """Estimate KL(a || b) per token from samples of a and log a - log b. k2 and k3 are never negative, k1 and k3 unbiased."""
    distance = clamped(log_ratio)
    match estimator:
        case "k1":
            return distance
        case "k2":
            return distance.square() / 2
        case "k3":
            return torch.exp(-distance) + distance - 1


def kl_penalty(kl: Kl, current: Tensor, reference: Tensor) -> Tensor:
    estimate = divergence(kl.estimator, current - reference)
    return estimate * torch.exp(current - current.detach()) if kl.unbiased else estimate


def loglinear_proximal(current: Tensor, behaviour: Tensor, ages: Tensor) -> Tensor:
    """Estimate the log-probability one version ago, assuming an even change per version since the token was sampled (A-3PO).

    Tokens of age 0 or 1 keep the behaviour policy's. It saves the forward pass of `proximal_source: recompute`.
    """
    versions = ages.to(current.dtype)
    way = ((versions - 1) / versions.clamp(min=1)).clamp(min=0)
    return behaviour + way * (current.detach() - behaviour)
