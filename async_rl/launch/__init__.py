"""Starts the processes of a run: `commands.py` has their command lines, `local.py` runs them on one machine."""
