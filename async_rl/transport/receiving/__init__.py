"""A worker's end of the weight wire: `receiver.py` first, then `parcel_receiver.py`."""
