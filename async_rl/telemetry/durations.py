"""Durations for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """0:07, 12:30, 3:04:05"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
