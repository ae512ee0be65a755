"""Models built with Megatron."""
