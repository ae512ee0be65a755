"""A trained reward model as a reward: `async-rl reward serve` answers, environments ask.

from rollout_workers.reward_model.client import ServedReward
"""
