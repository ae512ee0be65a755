"""Parts of memory.py."""
