"""The memory plan of a run."""
