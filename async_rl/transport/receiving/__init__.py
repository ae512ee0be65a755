"""A worker's end of the weight wire: `receiver.py` first, then `intake.py`."""
