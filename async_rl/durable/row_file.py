"""A file that grows by rows, one line each, and holds nothing but whole ones.

A full disk takes a part of a row before it refuses the rest, and a crash cuts the last one. Such a piece is cut off: at once
after a failed write, else when the file is opened next. So a row never merges with the one after it.
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
_TAIL = 4 << 20


class RowFile:
    """May be used by several threads; each `append` is one change."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        """With `sync`, a row that was appended survives a power loss; without, a crash of the process. Raises OSError."""
        self._point, self._sync = f"append.{path.name}", sync
        define(self._point)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._lock = threading.Lock()
        self._torn: tuple[int, int] | None = None
        """Where a piece of a row begins and ends that a failed write left."""
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
        """Write a row, which holds no line break. After an OSError nothing of it is in the file."""
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
                with suppress(OSError):  # then the next append cuts it, or fails too
                    self._cut()
                raise

    def close(self) -> None:
        """Waits for a thread that appends."""
        with self._lock:
            os.close(self._file)

    def _cut(self) -> None:
        if self._torn is not None:
            begin, end = self._torn
            if os.fstat(self._file).st_size == end:  # else another process has appended a row, which must not go with it
                os.ftruncate(self._file, begin)
            self._torn = None


def end_of_rows(file: int, size: int) -> int:
    """Where the last whole row of an open file ends; what follows was cut by a crash."""
    for start in range((size - 1) // _BLOCK * _BLOCK, -1, -_BLOCK) if size else ():
        if (found := os.pread(file, min(_BLOCK, size - start), start).rfind(b"\n")) >= 0:
            return start + found + 1
    return 0


def rows_of(path: Path) -> Iterator[bytes]:
    """The whole rows of a file, without their line breaks. One that is being written, or was cut, is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def last_rows(path: Path, most: int) -> list[bytes]:
    """At most so many rows of the end of a file, the oldest first; all within its last few MiB."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _TAIL)
        file.seek(start)
        rows = file.read().split(b"\n")[:-1]  # what follows the last line break is being written, or was cut
    return rows[1 if start else 0 :][-most:]
