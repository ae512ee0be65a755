"""The archive file that is being written, and the repair of one whose writer died.

Each writer begins a file of its own and locks it until its process ends. So a paused writer that resumes beside its successor
does no harm, and a file without lock and index is one whose writer died.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from async_rl.durable.failpoints import define, failpoint
from async_rl.durable.file_lock import try_lock
from async_rl.durable.whole_file import sync_folder, write_all
from buffer.archive.segment import (
    GroupSummary,
    SegmentEntry,
    SegmentIndex,
    file_header,
    files_in,
    record_head,
    scan,
    segment_number,
    segment_path,
    write_index,
)

log = logging.getLogger(__name__)
define("archive.begun", "archive.closed", "archive.indexed")


class OpenSegment:
    """An archive file that is being written; records count once `sync` has returned."""

    def __init__(self, folder: Path) -> None:
        self.path, self._file = _begin(folder)
        self.ids: set[str] = set()
        self.end = 0
        self._entries: list[SegmentEntry] = []
        self._durable = 0, 0
        """Number of durable records, and the offset behind them."""
        failpoint("archive.begun")

    def describe(self, about: Mapping[str, object]) -> None:
        """Write the file header, before any record."""
        self._put(file_header(about))

    def add(self, summary: GroupSummary, payload: bytes) -> None:
        offset = self.end
        self._put(record_head(summary, payload, offset))
        self._put(payload)
        self._entries.append(SegmentEntry(summary=summary, offset=offset, length=self.end - offset))
        self.ids.add(summary.id)

    def sync(self) -> None:
        os.fsync(self._file)
        if not self._durable[0]:
            sync_folder(self.path.parent)
        self._durable = len(self._entries), self.end

    def close(self) -> SegmentIndex | None:
        """Cut off what is not durable and write the index; None if no record is left."""
        count, end = self._durable
        index = SegmentIndex(entries=tuple(self._entries[:count]), damage=(), end=end)
        try:
            failpoint("archive.closed")
            with suppress(OSError):  # the disk fails: the next writer settles this file
                if not count:
                    self.path.unlink()
                    return None
                os.ftruncate(self._file, end)
                write_index(self.path, index)
                failpoint("archive.indexed")
        finally:
            os.close(self._file)
        return index if count else None

    def _put(self, data: bytes) -> None:
        self.end += write_all(self._file, data)


def settle(path: Path) -> bool:
    """Finish a file whose writer has died: cut off its unfinished record and write the index.

    False if the writer is alive, or if the file holds no record.
    """
    file = os.open(path, os.O_RDWR)
    try:
        if not try_lock(file):
            return False
        index = scan(path)
        if not index.entries and not index.damage:
            path.unlink()
            return False
        if unfinished := os.fstat(file).st_size - index.end:
            log.warning("%s ended in the middle of a record: its last %d bytes are cut off", path.name, unfinished)
            os.ftruncate(file, index.end)
        # The writer may have died before its fsync; from here on these groups count as archived.
        os.fsync(file)
        sync_folder(path.parent)
        write_index(path, index)
        return True
    finally:
        os.close(file)


def _begin(folder: Path) -> tuple[Path, int]:
    """Create and lock the next file."""
    number = max((segment_number(path) for path in files_in(folder)), default=0)
    while True:
        number += 1
        path = segment_path(folder, number)
        with suppress(FileExistsError):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if try_lock(file) and os.fstat(file).st_nlink:  # else another writer has removed it as an empty one
                return path, file
            os.close(file)
