"""Spent groups on disk: `writing.py` appends, `reading.py` lists, `segment.py` is the format."""
