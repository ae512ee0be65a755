"""Which sequence goes into which row of which rank: `planner.py` first."""

from learner.packing.planner import Bins, plan

__all__ = ["Bins", "plan"]
