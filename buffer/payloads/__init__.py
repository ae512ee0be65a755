"""Payloads, the encoded groups: `codec.py` first; `store.py` puts them into Redis or into `files.py`'s folder."""
