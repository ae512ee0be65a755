"""Client-side journals: what each process was told, one line each, written before anything else happens.

A line is one write to a file opened for appending, so it survives kill -9. The auditor trusts these lines and the final
state of the server, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """One life of one role."""

    def __init__(self, folder: Path, role: str, life: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._head = {"role": role, "life": life}
        self._file = os.open(folder / f"{role}.{life:04d}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, did: str, **facts: object) -> None:
        os.write(self._file, json.dumps({"did": did, **facts, **self._head}).encode() + b"\n")


def read(folder: Path) -> list[Line]:
    """Every line, life by life. Within a life they are in the order in which they happened."""
    return [line for path in sorted(folder.glob("*.jsonl")) for line in _lines(path)]


def _lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):  # a life may have been cut in its last word
            yield json.loads(text)
