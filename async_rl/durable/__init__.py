"""Files that survive crashes and full disks: `whole_file.py` first, then `row_file.py` and `best_effort.py`."""
