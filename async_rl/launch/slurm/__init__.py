"""Runs a fleet as jobs of Slurm: `fleet.py` first."""
