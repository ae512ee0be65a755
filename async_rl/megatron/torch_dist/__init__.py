"""Megatron-LM's checkpoints: `keys.py` places parameters, `arguments.py` describes models; then `reading.py`, `writing.py`."""
