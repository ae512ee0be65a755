"""Checkpoints of the learner: `checkpointer.py` (one rank) and `schedule.py` (the loop) first."""
