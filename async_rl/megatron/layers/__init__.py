"""Layers of a model: their specs (`specs.py`), norms and activation. Attention and experts have folders of their own."""
