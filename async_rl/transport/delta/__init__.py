"""Deltas between versions: sent piece by piece (parcel_delta.py), encoded in few bits (codec.py and the files it uses)."""
