"""From rewards to advantages: of whole rollouts (`group.py`, `rollouts.py`) and of single tokens (`gae.py`, `tokens.py`)."""

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
