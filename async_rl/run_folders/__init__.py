"""Reads what runs left in their folders, for everything that shows runs: `folder.py` first. Nothing here needs a live run."""
