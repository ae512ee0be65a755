"""Rollout workers: from tickets to scored groups of rollouts. `worker.py` first, then `episodes/`."""
