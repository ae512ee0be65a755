"""Weights to and from Hugging Face folders: `names.py` is the table, `tensors.py` converts, `export.py` writes."""
