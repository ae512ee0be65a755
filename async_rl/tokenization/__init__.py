"""Tokenizers (`tokenizers.py`) and training texts as token rows (`rendering.py`)."""
