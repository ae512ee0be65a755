"""Rows that are worth less than the run that writes them: what the disk refuses is dropped, counted, and missed once aloud."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from async_rl.durable.row_file import RowFile, rows_of

log = structlog.get_logger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class BestEffortRows:
    """A row file of at most `max_bytes`, half of it in PATH.1: what is older is deleted."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path, self._half = path, max_bytes // 2
        self._file: RowFile | None = None
        self._is_refused = False
        self.dropped = 0
        """Rows, since the process started."""

    def add(self, row: bytes) -> bool:
        """Append a row. False when it was dropped; never raises OSError."""
        try:
            if self._file is not None and self._file.size + len(row) >= self._half:
                self._turn()
            if self._file is None:
                self._file = RowFile(self._path, sync=False)
            self._file.append(row)
        except OSError as error:
            self.dropped += 1
            self.close()
            if not self._is_refused:
                log.warning(f"{why(error, self._path)}; {self._path.name} is not written until that is over, training goes on")
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

    def _turn(self) -> None:
        self.close()
        self._path.replace(older(self._path))


def read_best_effort(path: Path) -> list[bytes]:
    """The rows that are left, oldest first. May be called while they are written."""
    newer = list(rows_of(path))  # read first: what moves to the older file meanwhile comes twice, and nothing is missing
    return [*rows_of(older(path)), *newer]


@contextmanager
def missed_aloud(path: Path, say: Callable[[str], object]) -> Generator[None]:
    """Go on when a file that the run can do without cannot be written, and say so."""
    try:
        yield
    except OSError as error:
        say(f"{why(error, path)}; {path.name} is not written")


def older(path: Path) -> Path:
    """Where the rows before those in `path` are."""
    return path.with_name(f"{path.name}.1")


def why(error: OSError, path: Path) -> str:
    """Why a file cannot be written, with what to do about it."""
    if error.errno in NO_ROOM:
        return f"the disk of {path.parent} is full ({error.strerror}): make room there"
    return f"{path} cannot be written ({error.strerror}): look after its disk"
