"""Random histories of a buffer against a model of it; start with test_buffer_state_machine.py."""
