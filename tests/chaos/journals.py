"""Client-side journals: each process writes one line per event before it continues.

A line is one write to a file opened for appending, so it survives kill -9. The auditor relies on these lines, the checkpoints
and the server's final content alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """The journal of one life of one role."""

    def __init__(self, folder: Path, role: str, life: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._head = {"role": role, "life": life}
        self._file = os.open(folder / f"{role}.{life:04d}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, did: str, **facts: object) -> None:
        os.write(self._file, json.dumps({"did": did, **facts, **self._head}).encode() + b"\n")


def read(folder: Path) -> list[Line]:
    """Return all lines, life by life, each life in order."""
    return [line for path in sorted(folder.glob("*.jsonl")) for line in _lines(path)]


def _lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):  # the last line of a killed process may be cut
            yield json.loads(text)
