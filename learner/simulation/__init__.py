"""Predict what a fleet does, from rates: slots, workers and a learner as discrete events. `model.py` first."""
