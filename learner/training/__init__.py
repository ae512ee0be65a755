"""`async-rl train`: SFT, DPO, reward models and distillation from tables of examples. `trainer.py` first.

Every rank reads the same table in the same order and takes its own part of each step, so no rank leads; they only agree when
to stop.
"""
