"""Log each cause of failure once, and again with its count at 10, 100, 1000 times.

A broken judge fails thousands of episodes at the same line: one log line is enough.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import structlog

from async_rl.board.worker_reports import WorkerNote
from async_rl.types import Failure

MOST = 1000
"""Number of causes remembered; beyond it the least recent are forgotten."""

log = structlog.get_logger()

Cause = tuple[str, ...]


class FailureLog:
    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self._times: OrderedDict[Cause, int] = OrderedDict()
        self._notes: deque[WorkerNote] = deque(maxlen=MOST)

    def take_notes(self) -> list[WorkerNote]:
        """Return what was logged since the last call, for the learner's console."""
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def note(self, failure: Failure, *, environment: str, task: str) -> None:
        times = self._count((environment, failure.boundary, failure.kind, place := _place(failure.message)))
        if _is_power_of_ten(times):
            log.warning(
                "episode failed" if times == 1 else "episodes failed",
                times=times,
                environment=environment,
                boundary=failure.boundary,
                kind=failure.kind,
                message=failure.message,
                task=task,
            )
            cause = f"episodes fail at {failure.boundary} with {failure.kind}{place if place != failure.message else ''}"
            self._note(environment, cause, failure.message, times)

    def note_leak(self, environment: str, what: str, names: list[str]) -> None:
        """Log tasks or processes that an episode started and did not end: see leaked_tasks.py and leaked_processes.py."""
        times = self._count((environment, what, *names))
        if _is_power_of_ten(times):
            log.warning(f"an episode ended with {what}", times=times, environment=environment, names=names)
            self._note(environment, f"episodes end with {what}", ", ".join(names), times)

    def _note(self, environment: str, cause: str, detail: str, times: int) -> None:
        self._notes.append(
            WorkerNote(worker=self._worker, environment=environment, cause=cause, detail=detail[:500], times=times)
        )

    def _count(self, cause: Cause) -> int:
        self._times[cause] = self._times.get(cause, 0) + 1
        self._times.move_to_end(cause)
        if len(self._times) > MOST:
            self._times.popitem(last=False)
        return self._times[cause]


def _place(message: str) -> str:
    """The location at the end of a message, if it has one: the text before it may differ each time."""
    start = message.rfind(" (")
    return message[start:] if start >= 0 and message.endswith(")") else message


def _is_power_of_ten(number: int) -> bool:
    return number == 10 ** (len(str(number)) - 1)
