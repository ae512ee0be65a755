"""warnings.jsonl: the warnings and errors that the processes of a run logged, in the run's folder.

    {"time": 1767225600.0, "role": "worker", "pid": 4711, "level": "warning", "event": "...", "details": {"times": "10"}}

Several processes append to it. A warning that cannot be written is lost: it is on the process's log in any case.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from async_rl.durable.best_effort import older
from async_rl.durable.row_file import RowFile
from async_rl.telemetry.rows import read_objects

NAME = "warnings.jsonl"
MOST_BYTES = 4_000_000
"""Size limit of the file and its rotated half together."""
LONGEST = 2000
"""Characters kept of a text."""


class WarningFile(logging.Handler):
    """Appends warnings to a run's warnings.jsonl; opened for each, because they are rare."""

    def __init__(self, run_folder: Path, role: str) -> None:
        super().__init__(logging.WARNING)
        self._path, self._role = run_folder / NAME, role

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except Exception:  # such as arguments that do not fit the text: no reason to raise in the code that logs
            self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        event, details = _parts(record)
        row = {
            "time": record.created,
            "role": self._role,
            "pid": os.getpid(),
            "level": record.levelname.lower(),
            "event": event[:LONGEST],
            "details": {name: value[:LONGEST] for name, value in details.items()},
        }
        with suppress(OSError):
            self._append(json.dumps(row).encode())

    def _append(self, row: bytes) -> None:
        if not self._path.parent.is_dir():  # on a machine that does not see the run's folder
            return
        file = RowFile(self._path, sync=False)
        try:
            file.append(row)
            if file.size >= MOST_BYTES // 2 and self._path.stat().st_size == file.size:  # no other process has rotated it
                self._path.replace(older(self._path))
        finally:
            file.close()


UNSHOWN = ("event", "level", "timestamp", "role", "exc_info")


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, str]]:
    """The text of a record and its further values; those of structlog are in `msg`."""
    message: Any = record.msg
    if isinstance(message, dict):
        found = cast("Mapping[str, Any]", message)
        return str(found.get("event", "")), {name: str(value) for name, value in found.items() if name not in UNSHOWN}
    return record.getMessage(), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningCause:
    """Warnings that differ in their numbers at most."""

    role: str
    level: str
    event: str
    """The text of the last one."""
    details: Mapping[str, str]
    """Further values of the last one."""
    count: int
    first: float
    last: float
    """Unix times."""


def read_warnings(run_folder: Path, *, since: float = 0.0) -> list[WarningCause]:
    """The causes of a run's warnings after a time, the most recent first."""
    found: dict[tuple[str, str], WarningCause] = {}
    for row in read_objects(run_folder / NAME):
        if (at := row.get("time", 0.0)) <= since:
            continue
        cause = row["role"], re.sub(r"\d+", "#", row["event"])
        before = found.pop(cause, None)
        found[cause] = WarningCause(
            role=row["role"],
            level=row["level"],
            event=row["event"],
            details=row["details"],
            count=1 if before is None else before.count + 1,
            first=at if before is None else before.first,
            last=at,
        )
    return list(reversed(found.values()))
