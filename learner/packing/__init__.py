"""Bin packing: assign sequences to packed rows of ranks. `planner.py` first."""
