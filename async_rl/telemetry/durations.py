"""Formats durations."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
