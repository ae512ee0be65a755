"""Serve a trained reward model (`async-rl reward serve`) and score answers with it.

from rollout_workers.reward_model.client import ServedReward
"""
