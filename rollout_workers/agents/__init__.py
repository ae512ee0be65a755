"""What people attach: a policy around a model, in an environment that poses tasks and scores answers."""

from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.rewards import Score

__all__ = ["RewardOnlyAgent", "Score"]
