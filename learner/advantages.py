"""Rewards to advantages, before anything is packed or sharded, because the statistics are those of whole groups.

Pure numpy in float64: a few thousand numbers, where rounding would otherwise turn equal rewards into tiny signals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveFloat

Floats = npt.NDArray[np.float64]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["group_std", "batch_std", "none"]


class AdvantageConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    baseline: Baseline = "group_mean"
    """What a reward is compared with. `leave_one_out` is the mean of the siblings without the rollout itself (RLOO)."""
    scale: Scale = "group_std"
    """What the difference is divided by: the deviation of the rewards inside the group, over the batch, or nothing."""
    unbiased: bool = True
    """Bessel's correction in the deviation."""
    eps: PositiveFloat = 1e-6
    """Added to the deviation."""


def group_advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    unbiased: bool = True,
    eps: float = 1e-6,
    valid: npt.ArrayLike | None = None,
) -> Floats:
    """One advantage per rollout; `group_ids` says which rollouts are siblings, `valid` which of them have a reward.

    Wherever a statistic of the group is used, a group without spread (all rewards equal, or one valid member) gets
    exactly 0. Rollouts that are not valid get 0 and appear in no statistic.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    is_valid = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid).astype(bool)
    if not np.isfinite(rewards[is_valid]).all():
        raise ValueError("a valid rollout has a reward that is not finite")
    rewards = np.where(is_valid, rewards, 0.0)
    _, group = np.unique(np.asarray(group_ids), return_inverse=True)
    siblings = _Statistics.per_group(rewards, group, is_valid, unbiased)
    batch = _Statistics.per_group(rewards, np.zeros_like(group), is_valid, unbiased)

    advantages = rewards - _baseline(baseline, rewards, siblings, batch)
    if scale != "none":
        advantages = advantages / ((siblings if scale == "group_std" else batch).std + eps)
    if baseline in ("group_mean", "leave_one_out") or scale == "group_std":
        advantages = np.where(siblings.has_spread, advantages, 0.0)
    if baseline == "batch_mean" or scale == "batch_std":
        advantages = np.where(batch.has_spread, advantages, 0.0)
    return np.where(is_valid, advantages, 0.0)


def _baseline(baseline: Baseline, rewards: Floats, siblings: _Statistics, batch: _Statistics) -> Floats:
    if baseline == "group_mean":
        return siblings.mean
    if baseline == "leave_one_out":
        return (siblings.mean * siblings.count - rewards) / np.maximum(siblings.count - 1, 1)
    if baseline == "batch_mean":
        return batch.mean
    return np.zeros_like(rewards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Statistics:
    """Statistics of a rollout's group, spread back over the rollouts."""

    count: Floats
    mean: Floats
    std: Floats
    has_spread: npt.NDArray[np.bool_]

    @staticmethod
    def per_group(rewards: Floats, group: npt.NDArray[np.intp], is_valid: npt.NDArray[np.bool_], unbiased: bool) -> _Statistics:
        num_groups = int(group.max(initial=-1)) + 1
        count = np.bincount(group, weights=is_valid.astype(np.float64), minlength=num_groups).astype(np.float64)
        mean = np.bincount(group, weights=rewards, minlength=num_groups) / np.maximum(count, 1)
        squares = np.where(is_valid, (rewards - mean[group]) ** 2, 0.0)
        freedom = np.maximum(count - 1 if unbiased else count, 1)
        std = np.sqrt(np.bincount(group, weights=squares, minlength=num_groups) / freedom)
        # equality is asked of the rewards themselves: the mean of equal floats need not be that float
        lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
        np.minimum.at(lowest, group, np.where(is_valid, rewards, np.inf))
        np.maximum.at(highest, group, np.where(is_valid, rewards, -np.inf))
        return _Statistics(count=count[group], mean=mean[group], std=std[group], has_spread=(lowest < highest)[group])
