"""Records events and groups of a run, on a thread of its own, so that training never waits for the disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import structlog

from async_rl.durable.best_effort import explain_write_error
from async_rl.durable.row_file import RowFile
from async_rl.payloads.codec import encode
from async_rl.recording.events import Event, count_events, write_event
from async_rl.recording.group_files import GroupFiles
from async_rl.recording.reading import EVENTS, ROLLOUTS
from async_rl.recording.recorded import GroupFacts, RecordedGroup, group_event, measure
from async_rl.recording.segments import SegmentedFile
from async_rl.recording.spans.export import SpanExport
from async_rl.types import RolloutGroup

CAPACITY = 4096
"""Rows that may wait to be written; further ones are counted as late."""
WAITING_BYTES = 256 * 2**20
"""Groups of this size may wait to be written; a slow disk must not take the learner's memory."""
TOKEN_BYTES = 16
"""Estimated size of a token of a waiting group, its part of the texts included."""
CLOSE_S = 10.0
"""Seconds that the last rows may take to be written."""

log = structlog.get_logger("async_rl.recording")


class EventFile:
    """Appends events to numbered files. `add` raises OSError."""

    def __init__(self, folder: Path, name: str, *, max_bytes: int) -> None:
        self.segments = SegmentedFile(folder, name, max_bytes=max_bytes, count=count_events)
        self._file: RowFile | None = None
        self._size = 0

    def add(self, event: Event) -> None:
        row = write_event(event)
        if self._file is not None and self._size + len(row) > self.segments.segment_bytes:
            self.close()
        if self._file is None:
            self._file = RowFile(self.segments.begin(), sync=False)
        self._file.append(row)
        self._size += len(row) + 1

    def close(self) -> None:
        """Close the file; a later `add` begins the next one."""
        file, self._file, self._size = self._file, None, 0
        if file is not None:
            file.close()


class Recorder:
    """Keeps what it is told, within the size limits. Never raises for the disk, and never blocks.

    consumes: events and groups from a bounded queue; beyond it they are counted     waits for:    the next one
    produces: rows of the files                                                     unblocked by: `event`, `group`; `close`
    """

    def __init__(
        self, run_folder: Path, process: str, *, events_bytes: int, rollouts_bytes: int, spans: SpanExport | None = None
    ) -> None:
        """A limit of 0 records nothing of that kind. `process` names the files, so that several processes may write.

        `spans` gets all events and groups, whatever the limits; it is closed with the recorder.
        """
        self._process, self._spans = process, spans
        self._events = EventFile(run_folder / EVENTS, process, max_bytes=events_bytes) if events_bytes else None
        self._groups = GroupFiles(run_folder / ROLLOUTS, process, max_bytes=rollouts_bytes) if rollouts_bytes else None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(CAPACITY)  # None: closed
        self._refusing: set[Path] = set()
        """Folders in which the last write failed."""
        self._is_closed = False
        self._bytes_given = self._bytes_written = 0
        """Estimated sizes of the groups that were queued, and of those that have left the queue."""
        self.dropped = 0
        """Events and groups that could not be written, since the process started."""
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        return self._events is not None or self._groups is not None or self._spans is not None

    @property
    def spans_dropped(self) -> int | None:
        """Spans that were not sent; None: none are wanted."""
        return self._spans.dropped if self._spans is not None else None

    def event(self, kind: str, *, at: float | None = None, seconds: float = 0.0, **fields: Any) -> None:
        """Record an event; `at` is when it began, by default now minus `seconds`."""
        began = at if at is not None else time.time() - seconds
        self.add(Event(kind=kind, at=began, seconds=seconds, process=self._process, fields=fields))

    def add(self, event: Event) -> None:
        """Record an event of `async_rl/recording/events.py`."""
        if self._events is not None or self._spans is not None:
            self._put(partial(self._add_event, event), self._events)

    def group(self, facts: GroupFacts, group: RolloutGroup, payload: bytes | memoryview = b"") -> None:
        """Record a group with its rollouts, and the event of its rolling out. `payload`: the encoded group, if it is there."""
        if not self.is_on:
            return
        file = self._groups if self._groups is not None else self._events
        size = TOKEN_BYTES * group.num_tokens
        if self._bytes_given + size - self._bytes_written > WAITING_BYTES and not self._queue.empty():
            self._lose(file, "late")
        elif self._put(partial(self._add_group, facts, group, payload, time.time(), size), file):
            self._bytes_given += size

    def note_unsent(self, number: int) -> None:
        """Count groups that were dropped and of which no head came."""
        if self._groups is not None:
            self._groups.segments.note_lost("unsent", number)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_S`."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning(f"the recording was not written within {CLOSE_S:g} s; its end is lost")
        if self._spans is not None:
            self._spans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def _add_event(self, event: Event) -> None:
        if self._spans is not None:
            self._spans.event(event)
        if self._events is not None:
            self._events.add(event)

    def _add_group(self, facts: GroupFacts, group: RolloutGroup, payload: bytes | memoryview, at: float, size: int) -> None:
        self._bytes_written += size
        if self._spans is not None:
            self._spans.group(RecordedGroup(facts=facts, content=group))
        if self._events is None and self._groups is None:
            return
        measures, groups = measure(facts, group), self._groups
        if (events := self._events) is not None and facts.reserved_at:
            event = group_event(facts, group, measures, self._process, with_spans=groups is None)
            self._attempt(lambda: events.add(event), events)
        if groups is not None:
            groups.add(facts, group, payload if len(payload) else encode(group), measures, at=at)

    def _put(self, write: Callable[[], None], file: EventFile | GroupFiles | None) -> bool:
        """Queue a write. `file`: whose loss it is if that fails; None: only spans are made of it."""
        try:
            self._queue.put_nowait(partial(self._attempt, write, file))
        except queue.Full:
            self._lose(file, "late")
            return False
        return True

    def _write(self) -> None:
        while (write := self._queue.get()) is not None:
            write()
        for file in (self._events, self._groups):
            if file is not None:
                self._attempt(file.segments.save, file)
                file.close()

    def _attempt(self, write: Callable[[], None], file: EventFile | GroupFiles | None) -> None:
        if file is None:
            write()
            return
        folder, reason = file.segments.folder, ""
        try:
            write()
        except OSError as error:
            reason = explain_write_error(error, folder)
        except Exception as error:  # a value that cannot be written, such as from user code: training goes on
            reason = f"something cannot be recorded in {folder}: {error}"
        if reason:
            self._lose(file, "refused")
            if folder not in self._refusing:
                log.warning(f"{reason[:500]}; what is recorded has gaps, training continues")
            self._refusing.add(folder)
        elif folder in self._refusing:
            self._refusing.discard(folder)
            log.info(f"{folder} is written again; missing so far: {self.dropped}")

    def _lose(self, file: EventFile | GroupFiles | None, why: str) -> None:
        self.dropped += 1
        if file is not None:
            file.segments.note_lost(why, 1)
