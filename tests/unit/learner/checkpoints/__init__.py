"""Checkpoints and fences."""
