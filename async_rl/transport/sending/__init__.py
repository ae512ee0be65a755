"""The learner's end of the weight wire: `sender.py` first, then `push_attempt.py` and `rank_sender.py`."""
