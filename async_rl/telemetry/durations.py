"""Formats durations."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def ago(moment: float, *, now: float | None = None) -> str:
    """How long ago a Unix time is: 12 s, 3 min, 5 h, 2 d."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
