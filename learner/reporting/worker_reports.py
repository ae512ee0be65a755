"""Notes of workers in the learner's log: each cause once, and again with its count at 10, 100, 1000, ..."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import structlog

from async_rl.board.inbox import Inbox
from async_rl.board.worker_reports import BLOCKED, NOTES, WorkerBlocked, WorkerNote
from async_rl.protocols import Board

log = structlog.get_logger("learner")

FORGET_S = 60.0
"""A report of a blocked worker is dropped after this time: the worker was ended, or it continued."""


class WorkerReports:
    def __init__(
        self,
        board: Board,
        *,
        on_note: Callable[[WorkerNote], None] = lambda _: None,
        on_blocked: Callable[[WorkerBlocked], None] = lambda _: None,
    ) -> None:
        self._board, self._on_note, self._on_blocked = board, on_note, on_blocked
        self._times: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        """(environment, cause) -> worker -> count."""
        self._told: dict[tuple[str, str], int] = {}
        self._blocked: dict[str, tuple[float, WorkerBlocked]] = {}
        """Worker -> time and report."""

    async def run_notes(self) -> None:
        """consumes: notes (board.read)    produces: log lines    unblocked by: any worker"""
        inbox = await Inbox.open(self._board, NOTES, WorkerNote)
        while True:
            for note in await inbox.read():
                self._on_note(note)
                self._count(note)

    async def run_blocked(self) -> None:
        """consumes: reports of blocked workers (board.read)    produces: log lines    unblocked by: any worker"""
        inbox = await Inbox.open(self._board, BLOCKED, WorkerBlocked)
        while True:
            for report in await inbox.read():
                self._on_blocked(report)
                self._blocked[report.worker] = (time.monotonic(), report)
                log.warning(str(report))

    @property
    def blocked(self) -> str:
        """A sentence about the worker that reported last that it is blocked; empty if none did lately."""
        since = time.monotonic() - FORGET_S
        recent = [(at, str(report)) for at, report in self._blocked.values() if at > since]
        others = f"; {len(recent) - 1} more were blocked in the last minute" if len(recent) > 1 else ""
        return max(recent)[1] + others if recent else ""

    def _count(self, note: WorkerNote) -> None:
        cause = (note.environment, note.cause)
        self._times[cause][note.worker] = note.times
        total = sum(self._times[cause].values())
        if total >= 10 * self._told.get(cause, 0):
            self._told[cause] = 10 ** (len(str(total)) - 1)
            workers = len(self._times[cause])
            log.warning(
                note.cause,
                environment=note.environment,
                times=total,
                detail=note.detail,
                **({"workers": workers} if workers > 1 else {"worker": note.worker}),
            )
