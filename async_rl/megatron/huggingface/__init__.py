"""Hugging Face folders: `names.py` maps parameter names, `tensors.py` converts tensors, `export.py` writes folders."""
