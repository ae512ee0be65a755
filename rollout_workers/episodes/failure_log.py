"""Every cause is logged once, and again with its count when it has come ten, a hundred, a thousand times.

A broken judge fails thousands of episodes in the same line of the same file: that is one thing to know.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import structlog

from async_rl.board.worker_reports import WorkerNote
from async_rl.types import Failure

MOST = 1000
"""Causes that are remembered; of more, those that did not come for longest are forgotten."""

log = structlog.get_logger()

Cause = tuple[str, ...]


class FailureLog:
    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self._times: OrderedDict[Cause, int] = OrderedDict()
        self._notes: deque[WorkerNote] = deque(maxlen=MOST)

    def take_notes(self) -> list[WorkerNote]:
        """What was logged since this was called last, for the console of the run."""
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
        """Something that an episode started and did not end: see rollout_workers/episodes/leaked_tasks.py and strays.py."""
        times = self._count((environment, what, *names))
        if _is_power_of_ten(times):
            log.warning(f"an episode left {what}, which were ended", times=times, environment=environment, names=names)
            self._note(environment, f"episodes leave {what}", ", ".join(names), times)

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
    """The line that raised, where the message ends with it: what stands before may name another thing each time."""
    start = message.rfind(" (")
    return message[start:] if start >= 0 and message.endswith(")") else message


def _is_power_of_ten(number: int) -> bool:
    return number == 10 ** (len(str(number)) - 1)
