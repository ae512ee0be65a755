"""Runs a fleet on a Ray cluster, which places processes and does nothing else: `fleet.py` first."""
