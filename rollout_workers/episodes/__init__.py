"""One episode and one group of episodes: `episode.py` first, then `group_rollout.py`."""
