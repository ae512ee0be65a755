"""Advantages per rollout, computed before packing because the statistics are over whole groups.

numpy in float64: a few thousand numbers, and in float32 rounding would turn equal rewards into small signals. Per-token
advantages are computed from packed rows in torch (gae.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Groups = npt.NDArray[np.intp]

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "runner_up", "batch_mean", "none"]
Scale = Literal["group_std", "group_mean", "batch_std", "none"]


def group_advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    unbiased: bool = True,
    eps: float = 1e-6,
    valid: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> Floats:
    """Return one advantage per rollout.

    `group_ids`: rollouts with equal ids are siblings. `valid`: which rollouts have a reward. `lengths`: sampled tokens of
    each, needed by `length_weighted`. Where a statistic of the group is used, a group without spread (equal rewards, or one
    valid rollout) gets exactly 0. Rollouts that are not valid get 0 and appear in no statistic.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    is_valid = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid).astype(bool)
    if not np.isfinite(rewards[is_valid]).all():
        raise ValueError("a valid rollout has a reward that is not finite")
    rewards = np.where(is_valid, rewards, 0.0)
    _, group = np.unique(np.asarray(group_ids), return_inverse=True)
    siblings = _Statistics.per_group(rewards, group, is_valid, unbiased)
    batch = _Statistics.per_group(rewards, np.zeros_like(group), is_valid, unbiased)

    match baseline:
        case "group_mean":
            advantages = rewards - siblings.mean
        case "leave_one_out":
            others_mean = (siblings.mean * siblings.count - rewards) / np.maximum(siblings.count - 1, 1)
            advantages = rewards - others_mean
        case "length_weighted":
            if lengths is None:
                raise ValueError("baseline length_weighted needs `lengths`")
            weights = np.where(is_valid, np.asarray(lengths, dtype=np.float64), 0.0)
            advantages = rewards - _mean_per_group(rewards, group, weights)
        case "runner_up":
            advantages = np.maximum(rewards - _second_per_group(rewards, group, is_valid), 0.0)
        case "batch_mean":
            advantages = rewards - batch.mean
        case "none":
            advantages = rewards

    if scale == "group_mean":
        advantages = np.divide(advantages, siblings.mean, out=np.zeros_like(advantages), where=siblings.mean > 0)
    elif scale != "none":
        advantages = advantages / ((siblings if scale == "group_std" else batch).std + eps)
    if baseline not in ("batch_mean", "none") or scale in ("group_std", "group_mean"):
        advantages = np.where(siblings.has_spread, advantages, 0.0)
    if baseline == "batch_mean" or scale == "batch_std":
        advantages = np.where(batch.has_spread, advantages, 0.0)
    return np.where(is_valid, advantages, 0.0)


def best_and_worst(rewards: npt.ArrayLike, group_ids: npt.ArrayLike, *, valid: npt.ArrayLike) -> Floats:
    """Return 1 for the best and -1 for the worst valid rollout of each group, the first ones of several. Others, and groups
    with equal rewards, get 0.
    """
    rewards, group, is_valid = np.asarray(rewards, np.float64), np.asarray(group_ids), np.asarray(valid).astype(bool)
    signs = np.zeros_like(rewards)
    for one in np.unique(group):
        (siblings,) = np.nonzero((group == one) & is_valid)
        if len(siblings) and rewards[siblings].min() < rewards[siblings].max():
            signs[siblings[rewards[siblings].argmax()]] = 1.0
            signs[siblings[rewards[siblings].argmin()]] = -1.0
    return signs


def whiten_rollouts(advantages: npt.ArrayLike, tokens: npt.ArrayLike, *, eps: float = 1e-8) -> Floats:
    """Normalise to mean 0 and variance 1 over all trained tokens of the batch, where each rollout has `tokens` of them.

    Rollouts without trained tokens appear in no statistic. If all advantages are equal the result is exactly 0.
    """
    advantages, weights = np.asarray(advantages, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    counted = advantages[weights > 0]
    if len(counted) == 0 or counted.min() == counted.max():
        return np.zeros_like(advantages)
    mean = np.average(advantages, weights=weights)
    variance = weights @ (advantages - mean) ** 2 / max(weights.sum() - 1, 1)
    return (advantages - mean) / np.sqrt(variance + eps)


def overlong_penalty(lengths: npt.ArrayLike, *, max_length: int, buffer: int, factor: float = 1.0) -> Floats:
    """Return the term added to each reward: 0 up to max_length - buffer sampled tokens, then falling linearly, -factor at
    `max_length`.
    """
    excess = np.asarray(lengths, dtype=np.float64) - (max_length - buffer)
    return np.minimum(-excess / buffer * factor, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Statistics:
    """Statistics of each rollout's group, one entry per rollout."""

    count: Floats
    mean: Floats
    std: Floats
    has_spread: Bools

    @staticmethod
    def per_group(rewards: Floats, group: Groups, is_valid: Bools, unbiased: bool) -> _Statistics:
        num_groups = int(group.max(initial=-1)) + 1
        valid = is_valid.astype(np.float64)
        count = np.bincount(group, valid, num_groups)[group].astype(np.float64)
        mean = _mean_per_group(rewards, group, valid)
        squares = np.bincount(group, valid * (rewards - mean) ** 2, num_groups)[group]
        std = np.sqrt(squares / np.maximum(count - 1 if unbiased else count, 1))
        # compared by the rewards themselves: the mean of equal floats need not equal them
        lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
        np.minimum.at(lowest, group, np.where(is_valid, rewards, np.inf))
        np.maximum.at(highest, group, np.where(is_valid, rewards, -np.inf))
        return _Statistics(count=count, mean=mean, std=std, has_spread=(lowest < highest)[group])


def _mean_per_group(rewards: Floats, group: Groups, weights: Floats) -> Floats:
    total = np.bincount(group, weights)[group]
    return np.bincount(group, weights * rewards)[group] / np.where(total > 0, total, 1.0)


def _second_per_group(rewards: Floats, group: Groups, is_valid: Bools) -> Floats:
    """The second best reward of each group; undefined for groups of one."""
    ranked = np.where(is_valid, rewards, -np.inf)
    order = np.lexsort((ranked, group))
    second = np.maximum(np.cumsum(np.bincount(group)) - 2, 0)
    return ranked[order[second]][group]
