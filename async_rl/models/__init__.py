"""Descriptions of models, without torch (except stored_weights.py): `shape.py` first, `families.py`, then `hf_config.py`."""
