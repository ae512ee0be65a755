"""Bin packing: assign sequences to packed rows of ranks. `planner.py` first."""

from learner.packing.planner import Bins, plan

__all__ = ["Bins", "plan"]
