"""Checks this machine and the Redis of a run, for `async-rl doctor`: `__main__.py` first."""
