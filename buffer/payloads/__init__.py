"""Stored payloads, the groups that async_rl/payloads/ encodes: `store.py` first; it uses Redis or `files.py`'s folder."""
