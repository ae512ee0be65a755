"""The losses: `functions.py` first, with their formulas; then one file per part of the policy loss."""

from async_rl.config.training import DpoConfig
from learner.losses.aggregation import StepCounts, count
from learner.losses.config import PolicyLossConfig, ValueLossConfig
from learner.losses.functions import (
    Loss,
    dpo_loss,
    policy_loss,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
    value_loss,
)

__all__ = [
    "DpoConfig",
    "Loss",
    "PolicyLossConfig",
    "StepCounts",
    "ValueLossConfig",
    "count",
    "dpo_loss",
    "policy_loss",
    "reward_model_loss",
    "sequence_logprobs",
    "sft_loss",
    "value_loss",
]
