"""Megatron's dynamic inference engine in all supported versions: `build.py`, then `dynamic_engine.py`."""
