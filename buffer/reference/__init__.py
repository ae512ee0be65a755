"""The buffer in memory, as an explanation of the Redis one and for tests: `state_machine.py` first."""
