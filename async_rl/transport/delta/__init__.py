"""Versions as differences to the one before: how they travel (difference), how few bits they need (codec and what it uses)."""
