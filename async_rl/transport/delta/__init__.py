"""Deltas between versions: sent piece by piece (parcel_delta.py), encoded by compact_codec.py or parallel_codec.py."""
