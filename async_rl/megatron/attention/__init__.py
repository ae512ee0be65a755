"""Attention over packed rows (`self_attention.py`) and over pages of the KV cache (`paged_attention.py`)."""
