"""What the control traffic of a fleet costs Redis and the learner. Pure; measured by `benchmarks/scale.py --model`."""

from __future__ import annotations

WORKER_SECOND_S = 139e-6
"""Seconds of a core of Redis: heartbeats of a worker for a second."""
GROUP_S = 445e-6
"""Seconds of a core of Redis: ticket, commit and take of a group without its payload."""
PUSH_S = 272e-6
"""Seconds of a core of Redis: a worker's messages in a push."""
LEARNER_PUSH_S = 262e-6
"""Seconds of the learner: a worker's messages in a push."""


def redis_share(workers: int, *, groups_per_s: float, pushes_per_s: float) -> float:
    """Return the share of a core of Redis. A run's keys live on one node of a Cluster, so more nodes do not help."""
    return workers * (WORKER_SECOND_S + PUSH_S * pushes_per_s) + GROUP_S * groups_per_s
