"""A worker's end of the weight wire: `receiver.py` first, then `reception.py` (its states) and `parcel_receiver.py`."""
