"""Warnings in the logs of a run's processes, counted by cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 18
"""Read from the end of each log."""
LONGEST_CAUSE = 300
_LINE = re.compile(r"^(\d\d:\d\d:\d\d) \[(warning|error|critical)\s*\] (.*)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FIELDS = re.compile(r"\s+\w+=('[^']*'|\"[^\"]*\"|\S+)")
_NUMBERS = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedWarning:
    level: str
    log: str
    """The process whose log it is in."""
    text: str
    """The last line of this cause."""
    at: str
    times: int


def read_warnings(folder: Path) -> list[LoggedWarning]:
    """One entry per process and cause, in the order of their last lines. Lines that differ in numbers only have one cause."""
    found: dict[tuple[str, str], LoggedWarning] = {}
    for path in sorted((folder / "logs").glob("*.log")):
        for at, level, text in _warnings_of(path):
            key = path.stem, _NUMBERS.sub("#", _FIELDS.sub("", text))
            times = found.pop(key).times + 1 if key in found else 1
            found[key] = LoggedWarning(level=level, log=path.stem, text=text[:LONGEST_CAUSE], at=at, times=times)
    return list(found.values())


def _warnings_of(path: Path) -> Iterator[tuple[str, str, str]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - READ_BYTES))
            text = file.read(READ_BYTES).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if found := _LINE.match(_COLOURS.sub("", line)):
            yield found[1], found[2], found[3]
