"""How names are found: public ones on first use (`lazy.py`), old ones for one release (`old_names.py`), the code that a
configuration names (`references.py`), and shipped configurations (`shipped_files.py`).
"""
