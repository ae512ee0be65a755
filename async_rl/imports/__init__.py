"""How public names are imported: on first use (`lazy.py`), and under old names for one release (`old_names.py`)."""
