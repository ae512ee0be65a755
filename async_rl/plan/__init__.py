"""The GPU and host memory that a run needs, from its configuration and without torch: `memory.py` first."""
