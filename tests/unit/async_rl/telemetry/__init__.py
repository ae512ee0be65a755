"""Metrics, warnings and evaluations of a run, and where they go."""
