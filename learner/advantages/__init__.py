"""From rewards to advantages: per rollout (`group.py`, `rollouts.py`) and per token (`gae.py`)."""

from learner.advantages.gae import gae, whiten
from learner.advantages.group import Baseline, Bools, Floats, Scale, group_advantages, overlong_penalty, whiten_rollouts

__all__ = [
    "Baseline",
    "Bools",
    "Floats",
    "Scale",
    "gae",
    "group_advantages",
    "overlong_penalty",
    "whiten",
    "whiten_rollouts",
]
