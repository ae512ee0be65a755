"""Append-only row files that must not stop a run: rows that cannot be written are dropped, counted, and reported once."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from async_rl.durable.row_file import RowFile, rows_backwards, rows_of

log = structlog.get_logger(__name__)

FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class BestEffortRows:
    """A row file of at most `max_bytes`: at half of that it is rotated to PATH.1, which replaces the previous one."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path, self._half = path, max_bytes // 2
        self._file: RowFile | None = None
        self._is_refused = False
        self.dropped = 0
        """Dropped rows, since the process started."""

    def add(self, row: bytes) -> bool:
        """Append a row. False when it was dropped; never raises OSError."""
        try:
            if self._file is not None and self._file.size + len(row) >= self._half:
                self._rotate()
            if self._file is None:
                self._file = RowFile(self._path, sync=False)
            self._file.append(row)
        except OSError as error:
            self.dropped += 1
            self.close()
            if not self._is_refused:
                log.warning(f"{explain_write_error(error, self._path)}; {self._path.name} loses rows, training continues")
            self._is_refused = True
            return False
        if self._is_refused:
            log.info(f"{self._path.name} is written again; rows dropped so far: {self.dropped}")
        self._is_refused = False
        return True

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _rotate(self) -> None:
        self.close()
        self._path.replace(older(self._path))


def read_best_effort(path: Path) -> list[bytes]:
    """The rows of both files, oldest first. May be called while they are written."""
    newer = list(rows_of(path))  # read first: if the file is rotated meanwhile, rows come twice and none is missing
    return [*rows_of(older(path)), *newer]


def read_backwards(path: Path) -> Iterator[bytes]:
    """The rows of both files, the last one first. Reads no more than is asked for."""
    yield from rows_backwards(path)
    yield from rows_backwards(older(path))


@contextmanager
def report_write_error(path: Path, say: Callable[[str], object]) -> Generator[None]:
    """Report an OSError of an optional file through `say` and continue."""
    try:
        yield
    except OSError as error:
        say(f"{explain_write_error(error, path)}; {path.name} is not written")


def older(path: Path) -> Path:
    """The path of the rotated file."""
    return path.with_name(f"{path.name}.1")


def explain_write_error(error: OSError, path: Path) -> str:
    """Explain why a file cannot be written, and what to do about it."""
    if error.errno in FULL_DISK_ERRORS:
        return f"the disk of {path.parent} is full ({error.strerror}): make room there"
    return f"{path} cannot be written ({error.strerror}): check its disk"
