"""The learner: from groups to new weights. `loop.py` first, then `step.py` and `model.py`."""
