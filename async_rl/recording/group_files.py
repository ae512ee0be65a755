"""Writes the recorded rollouts: records one after the other in NAME-N.bin, and their rows in NAME-N.jsonl, the index.

A row is written after its record, so a row that can be read has its record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from async_rl.durable.row_file import RowFile, rows_of
from async_rl.durable.whole_file import write_all
from async_rl.recording.recorded import GroupFacts, GroupMeasures, row_of, write_record
from async_rl.recording.rows import read_row, write_row
from async_rl.recording.segments import SegmentedFile, data_path, files_of
from async_rl.types import RolloutGroup


class GroupFiles:
    """Appends groups. `add` raises OSError; the files stay readable."""

    def __init__(self, folder: Path, name: str, *, max_bytes: int) -> None:
        self.segments = SegmentedFile(folder, name, max_bytes=max_bytes, count=count_groups)
        self._index: RowFile | None = None
        self._data = -1
        self._size = self._end = 0
        """Bytes of both files, and of the data."""

    def add(
        self, facts: GroupFacts, group: RolloutGroup, payload: bytes | memoryview, measures: GroupMeasures, *, at: float
    ) -> None:
        """`payload`: the encoded group."""
        record = write_record(facts, payload)
        if self._index is not None and self._size + len(record) > self.segments.segment_bytes:
            self.close()
        if self._index is None:
            self._open()
        assert self._index is not None
        offset = self._end
        row = write_row(row_of(facts, group, measures, record, at=at, offset=offset))
        try:
            write_all(self._data, record)
            self._index.append(row)
        except OSError:
            with suppress(OSError):  # else its part stays, and no row refers to it
                os.ftruncate(self._data, offset)
            self._end = os.fstat(self._data).st_size
            raise
        self._end = offset + len(record)
        self._size += len(record) + len(row)

    def close(self) -> None:
        """Close the files; a later `add` begins the next ones."""
        index, data = self._index, self._data
        self._index, self._data, self._size, self._end = None, -1, 0, 0
        with suppress(OSError):
            if index is not None:
                index.close()
        with suppress(OSError):
            if data >= 0:
                os.close(data)

    def _open(self) -> None:
        path = self.segments.begin()
        try:
            self._data = os.open(data_path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._index = RowFile(path, sync=False)
        except OSError:
            self.close()
            for file in files_of(path):
                file.unlink(missing_ok=True)
            raise


def count_groups(path: Path) -> tuple[Mapping[str, int], float]:
    """Return how many groups and rollouts a file holds, and when the newest was recorded."""
    rows = [row for row in map(read_row, rows_of(path)) if row is not None]
    number = Counter(groups=len(rows), rollouts=sum(len(row.numbers) for row in rows))
    return number, max((row.at for row in rows), default=0.0)
