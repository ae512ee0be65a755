"""From rewards to advantages: per rollout (`group.py`, `rollouts.py`) and per token (`gae.py`)."""
