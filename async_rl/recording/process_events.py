"""Events of the processes that a supervisor starts. They are few, so they are written at once, without a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from async_rl.durable.best_effort import report_write_error
from async_rl.recording.events import Event
from async_rl.recording.reading import EVENTS
from async_rl.recording.recorder import EventFile

SHARE = 16
"""These events get this part of the limit of all events, beside the learner's."""


class ProcessEvents:
    """Records that processes start and end. A disk that refuses is told to `warn` and otherwise ignored."""

    def __init__(self, run_folder: Path, *, events_bytes: int, warn: Callable[[str], object]) -> None:
        """`events_bytes`: the limit of all events; 0: off."""
        self._folder, self._warn = run_folder / EVENTS, warn
        self._file = EventFile(self._folder, "run", max_bytes=events_bytes // SHARE) if events_bytes else None
        self._started: set[str] = set()

    def started(self, name: str, pid: int) -> None:
        self._add(name, pid, "restarted" if name in self._started else "started", "")
        self._started.add(name)

    def ended(self, name: str, pid: int, *, was_asked: bool, detail: str) -> None:
        """`was_asked`: it finished, or was told to end."""
        self._add(name, pid, "left" if was_asked else "lost", detail)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _add(self, name: str, pid: int, what: str, detail: str) -> None:
        if self._file is not None:
            fields = {"name": name, "what": what, "pid": pid, "detail": detail}
            with report_write_error(self._folder, self._warn):
                self._file.add(Event(kind="process", at=time.time(), process="run", fields=fields))
