"""Parts of pace.py."""
