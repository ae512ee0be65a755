"""The learner's end of the weight wire: `sender.py` first, then `rank_sender.py`."""
