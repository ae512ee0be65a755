"""Log-ratios between policies, and the divergences that are estimated from them."""

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
    """KL(a || b) from tokens that a sampled, and their log a - log b; k2 and k3 are never negative, k3 is unbiased too."""
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
    """The log-probability one version before the weights being trained, had it moved evenly since the token was sampled.

    A token of age 0 or 1 keeps the behaviour policy's. This spares the forward pass that would tell (A-3PO).
    """
    versions = ages.to(current.dtype)
    way = ((versions - 1) / versions.clamp(min=1)).clamp(min=0)
    return behaviour + way * (current.detach() - behaviour)
