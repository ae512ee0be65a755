"""Verdicts of `async-rl doctor` about a Redis."""
