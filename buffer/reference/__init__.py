"""The buffer in memory, as the readable specification of the Redis one and for tests: `state_machine.py` first."""
