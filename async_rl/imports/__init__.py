"""How names are imported: public ones on first use (`lazy.py`), old ones for one release (`old_names.py`), and the code that a
configuration names (`references.py`).
"""
