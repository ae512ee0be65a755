"""What a model is, without torch: `shape.py` first, then `hf_config.py`."""
