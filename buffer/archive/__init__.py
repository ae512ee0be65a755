"""The archive of spent groups on disk: `writing.py` appends, `reading.py` reads and exports, `segment.py` is the format."""
