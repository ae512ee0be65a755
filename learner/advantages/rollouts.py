"""Shaped reward, advantage and trained flag of every rollout of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.types import Rollout, Status, TakenGroup
from learner.advantages.group import Bools, Floats, best_and_worst, group_advantages, overlong_penalty, whiten_rollouts
from learner.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutCredit:
    """One entry per rollout, in the order of the groups."""

    rewards: Floats
    """Shaped rewards; 0 for failed rollouts."""
    advantages: Floats
    """Advantages per rollout; 0 if the objective computes them per token."""
    is_trained: Bools


def assign_credit(groups: Sequence[TakenGroup], objective: Objective) -> RolloutCredit:
    """Shape rewards and compute advantages.

    Failed rollouts enter neither baseline nor loss; masked ones, and truncated ones with `train_truncated: false`, only the
    baseline. Advantages of type `preference` are signs here, and only pairs are trained.
    """
    rollouts = [rollout for taken in groups for rollout in taken.group.rollouts]
    owners = np.repeat(np.arange(len(groups)), [len(taken.group.rollouts) for taken in groups])
    lengths = np.array([rollout.num_sampled for rollout in rollouts], np.int64)
    is_scored = np.array([rollout.status is not Status.FAILED for rollout in rollouts], np.bool_)
    is_trained = np.array([_is_trained(rollout, objective) for rollout in rollouts], np.bool_)

    rewards = np.where(is_scored, [rollout.reward for rollout in rollouts], 0.0)
    if (overlong := objective.rewards.overlong) is not None:
        rewards = np.where(is_scored, rewards + overlong_penalty(lengths, **overlong.model_dump()), 0.0)

    advantages, config = np.zeros_like(rewards), objective.of_siblings
    if config is not None:
        advantages = group_advantages(
            rewards,
            owners,
            baseline=config.baseline,
            scale=config.scale,
            unbiased=config.unbiased,
            eps=config.eps,
            valid=is_scored,
            lengths=lengths,
        )
        if config.whiten:
            advantages = whiten_rollouts(advantages, np.where(is_trained, [_trained_tokens(each) for each in rollouts], 0))
    if objective.compares_pairs:
        advantages = best_and_worst(rewards, owners, valid=is_trained)
        is_trained = advantages != 0
    return RolloutCredit(rewards=rewards, advantages=advantages, is_trained=is_trained)


def _is_trained(rollout: Rollout, objective: Objective) -> bool:
    return rollout.status is Status.OK or (rollout.status is Status.TRUNCATED and objective.rewards.train_truncated)


def _trained_tokens(rollout: Rollout) -> int:
    """Count the trained tokens; no position predicts a sample's first token."""
    return sum(int(np.count_nonzero(sample.loss_mask[1:])) for sample in rollout.samples)
