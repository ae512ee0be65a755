"""`async-rl train`: supervised training, preferences, reward models and distillation, from tables of examples.

Begin with trainer.py. Every rank reads the same table in the same order and takes its own part of each step, so no rank
leads; they only have to agree when to stop.
"""
