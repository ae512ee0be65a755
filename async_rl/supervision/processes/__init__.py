"""Child processes, started, restarted and ended: `children.py` first."""
