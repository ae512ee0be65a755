"""The learning rate as a pure function of how many updates were made."""

from __future__ import annotations

import math

from async_rl.config.learner import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, updates: int, total: int) -> float:
    """Return the rate of the next update, after `updates` of `total`: linear warm-up, then the decay to `min_learning_rate`."""
    top, bottom = config.learning_rate, min(config.min_learning_rate, config.learning_rate)
    if updates < config.warmup_steps:
        return top * (updates + 1) / config.warmup_steps
    progress = min((updates - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    if config.decay == "linear":
        return top + (bottom - top) * progress
    if config.decay == "cosine":
        return bottom + (top - bottom) * (1 + math.cos(math.pi * progress)) / 2
    return top
