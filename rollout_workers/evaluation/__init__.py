"""Evaluation: play a fixed set of tasks and estimate scores. Nothing is trained on. `evaluator.py` first."""
