"""Appends spent groups to the archive: durable when `append` returns, each group once, within the configured limits."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from async_rl.durable.failpoints import define, failpoint
from async_rl.payloads.codec import BadPayload, decode
from async_rl.types import SpentGroup, Status
from buffer.archive.open_segment import OpenSegment, settle
from buffer.archive.segment import MAX_HEAD, GroupSummary, files_in, index_path, load_index, read_index

SEGMENT_BYTES = 64 * 2**20
FILES_WITHIN_LIMIT = 8
"""A segment is at most 1/8 of the size limit, because whole files are deleted."""
FILES_REMEMBERED = 4
"""Files whose ids are remembered. A group comes again only after a crash between archiving and discarding, so soon."""
LONGEST_NAME = 256
"""Longest environment name in a record; a worker could send any."""

log = logging.getLogger(__name__)
define("archive.appended", "archive.synced", "archive.removed")


class ArchiveWriter:
    """Appends to one archive. Blocks on the disk, so service.py calls it in a thread, one call at a time."""

    def __init__(
        self, folder: Path, *, run: str, max_gb: float, max_days: float | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._folder, self._run = folder, run
        self._max_bytes = round(max_gb * 1e9)
        self._max_age_s = max_days * 86400 if max_days is not None else math.inf
        self._segment_bytes = min(segment_bytes, self._max_bytes // FILES_WITHIN_LIMIT)
        self._is_settled = False
        self._open: OpenSegment | None = None
        self._closed: deque[ClosedFile] = deque()
        self._recent: deque[set[str]] = deque(maxlen=FILES_REMEMBERED)
        self._others_bytes = 0
        """Size of a file that another live writer holds: counted, but never deleted."""

    def append(self, groups: Sequence[SpentGroup]) -> int:
        """Append the groups that are not archived yet and return how many they are. After an OSError none counts as archived:
        append them again.
        """
        try:
            self._settle()
            written = 0
            for group in groups:
                if not self._has(group.id):
                    self._write(group)
                    written += 1
            failpoint("archive.appended")
            if self._open is not None:
                self._open.sync()
            failpoint("archive.synced")
            while self._closed and self._closed[0].newest < time.time() - self._max_age_s:
                self._remove_oldest()
        except OSError:
            self.close()  # cuts off what may not be on the disk
            self._is_settled = False
            raise
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _has(self, group_id: str) -> bool:
        if self._open is not None and group_id in self._open.ids:
            return True
        return any(group_id in ids for ids in self._recent)

    def _write(self, group: SpentGroup) -> None:
        largest = len(group.payload) + MAX_HEAD
        if self._open is not None and self._open.end + largest > self._segment_bytes:
            self._open.sync()
            self.close()
        while self._closed and self._bytes + largest > self._max_bytes:
            self._remove_oldest()
        if self._open is None:
            self._open = OpenSegment(self._folder)
            # The codec schema is that of the first group; each payload carries its own.
            codec_schema = int.from_bytes(group.payload[4:6], "little")
            self._open.describe({"run": self._run, "created": time.time(), "codec_schema": codec_schema})
        self._open.add(summary_of(group), group.payload)

    @property
    def _bytes(self) -> int:
        own = self._open.end if self._open is not None else 0
        return own + self._others_bytes + sum(file.bytes for file in self._closed)

    def close(self) -> None:
        if self._open is None:
            return
        file, self._open = self._open, None
        if (index := file.close()) is not None:
            self._recent.append({entry.summary.id for entry in index.entries})
            self._closed.append(_closed(file.path, index.end, newest=time.time()))

    def _remove_oldest(self) -> None:
        path = self._closed.popleft().path
        index_path(path).unlink(missing_ok=True)  # first: an index without its file would never be deleted
        failpoint("archive.removed")
        path.unlink(missing_ok=True)
        log.info("the archive is at its limit: %s is deleted", path)

    def _settle(self) -> None:
        """Before the first append and after an OSError: list the files, and index those whose writer died."""
        if self._is_settled:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._closed.clear()
        self._others_bytes = 0
        for path in files_in(self._folder):
            if read_index(path) is not None or settle(path):
                found = path.stat()
                self._closed.append(_closed(path, found.st_size, newest=found.st_mtime))
            elif path.exists():
                self._others_bytes += path.stat().st_size
        self._recent.clear()
        for file in list(self._closed)[-FILES_REMEMBERED:]:
            self._recent.append({entry.summary.id for entry in load_index(file.path).entries})
        self._is_settled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedFile:
    path: Path
    bytes: int
    """Including its index."""
    newest: float
    """When it was last written to, in seconds since 1970."""


def _closed(path: Path, size: int, *, newest: float) -> ClosedFile:
    with suppress(OSError):  # the index could not be written; it is rebuilt when needed
        size += index_path(path).stat().st_size
    return ClosedFile(path=path, bytes=size, newest=newest)


def summary_of(group: SpentGroup) -> GroupSummary:
    """Summarize a group for its record; a payload that cannot be decoded is archived with an empty summary."""
    environment, tokens, mean = "", 0, math.nan
    with suppress(BadPayload):
        decoded = decode(group.payload)
        rewards = [rollout.reward for rollout in decoded.rollouts if rollout.status is not Status.FAILED]
        environment, tokens = decoded.task.environment[:LONGEST_NAME], decoded.num_sampled
        mean = sum(rewards) / len(rewards) if rewards else math.nan
    reward = mean if math.isfinite(mean) else None
    return GroupSummary(id=group.id, step=group.step, time=time.time(), environment=environment, tokens=tokens, reward=reward)
