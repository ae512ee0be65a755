"""A durable append-only file of rows, one per line, without partial rows.

A full disk may accept only part of a row, and a crash may cut the last one. A partial row is truncated: at once after a failed
write, else when the file is next opened. So it never merges with the row after it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from async_rl.durable.failpoints import define, failpoint
from async_rl.durable.whole_file import sync_folder

_BLOCK = 1 << 16


class RowFile:
    """Thread-safe; each `append` is atomic."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        """With `sync` (fsync), appended rows survive a power loss; without, a crash of the process. Raises OSError."""
        self._point, self._sync = f"append.{path.name}", sync
        define(self._point)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._lock = threading.Lock()
        self._torn: tuple[int, int] | None = None
        """Start and end of a partial row left by a failed write."""
        try:
            size = os.fstat(self._file).st_size
            if (whole := end_of_rows(self._file, size)) < size:
                os.ftruncate(self._file, whole)
            if is_new and sync:
                sync_folder(path.parent)
        except OSError:
            os.close(self._file)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def append(self, row: bytes) -> None:
        """Append a row, which must not contain a line break. After an OSError the file is unchanged."""
        with self._lock:
            self._cut()
            before, written, line = os.fstat(self._file).st_size, 0, memoryview(row + b"\n")
            try:
                while written < len(line):
                    failpoint(self._point)
                    written += os.write(self._file, line[written:])
                if self._sync:
                    os.fsync(self._file)
            except OSError:
                self._torn = before, before + written
                with suppress(OSError):  # the next append truncates it
                    self._cut()
                raise

    def close(self) -> None:
        """Close the file, after an append in progress."""
        with self._lock:
            os.close(self._file)

    def _cut(self) -> None:
        if self._torn is not None:
            begin, end = self._torn
            if os.fstat(self._file).st_size == end:  # else another process has appended a row meanwhile, which must stay
                os.ftruncate(self._file, begin)
            self._torn = None


def end_of_rows(file: int, size: int) -> int:
    """The offset at which the last whole row of an open file ends."""
    for start in range((size - 1) // _BLOCK * _BLOCK, -1, -_BLOCK) if size else ():
        if (found := os.pread(file, min(_BLOCK, size - start), start).rfind(b"\n")) >= 0:
            return start + found + 1
    return 0


def rows_of(path: Path) -> Iterator[bytes]:
    """The whole rows of a file, without line breaks. A partial last row is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def rows_backwards(path: Path) -> Iterator[bytes]:
    """The whole rows of a file, the last one first. Reads no more of the file than is asked for."""
    if not path.exists():
        return
    with path.open("rb") as file:
        position, begun = end_of_rows(file.fileno(), path.stat().st_size), b""
        while position > 0:
            start = max(0, position - _BLOCK)
            file.seek(start)
            begun, *rows = (file.read(position - start) + begun).split(b"\n")
            yield from (row for row in reversed(rows) if row)
            position = start
        if begun:
            yield begun
