"""Descriptions of models, without torch (except stored_weights.py): `shape.py` first, then `hf_config.py`."""
