"""Follows a growing row file: over rotation to FILE.1, a writer that crashed and another one that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from async_rl.durable.best_effort import older
from async_rl.durable.row_file import rows_of


class FollowedFile:
    """Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def new_rows(self) -> Iterator[bytes]:
        """The whole rows that were appended since the last call; the first one begins with those of FILE.1.

        The file is kept open, so what was appended before a rotation is read from it afterwards.
        """
        if self._file is None:
            self._file = self._opened()
            yield from rows_of(older(self._path))
        while self._file is not None:
            yield from _rest(self._file)
            if not self._is_replaced(self._file):
                return
            yield from _rest(self._file)  # appended between the two lines above
            self._file.close()
            self._file = self._opened()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _opened(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except OSError:  # not there yet, or between rotation and the next row
            return None

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            now = self._path.stat()
        except OSError:  # rotated: the next row makes a new one
            return False
        return not os.path.samestat(now, os.fstat(file.fileno()))


def _rest(file: BinaryIO) -> Iterator[bytes]:
    """The whole rows from here on; a partial last one is left for the next call."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        yield line[:-1]
