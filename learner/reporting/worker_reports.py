"""What workers report, on the learner's console: each cause once, and again with its count at ten, a hundred, a thousand."""

from __future__ import annotations

import time
from collections import defaultdict

import structlog

from async_rl.board.inbox import Inbox
from async_rl.board.worker_reports import BLOCKED, BLOCKED_MESSAGES, NOTE_MESSAGES, NOTES, WorkerBlocked, WorkerNote
from async_rl.protocols import Board

log = structlog.get_logger("learner")

FORGET_S = 60.0
"""A worker that was blocked and says no more is no explanation any longer: it was ended, or it goes on."""


class WorkerReports:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._times: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        """By environment and cause: how often in each worker."""
        self._told: dict[tuple[str, str], int] = {}
        self._blocked: dict[str, tuple[float, WorkerBlocked]] = {}
        """By worker."""

    async def run_notes(self) -> None:
        """consumes: notes (board.read)    produces: lines on the console    unblocked by: any worker"""
        inbox = await Inbox.open(self._board, NOTES, NOTE_MESSAGES)
        while True:
            for note in await inbox.read():
                self._count(note)

    async def run_blocked(self) -> None:
        """consumes: reports of blocked workers (board.read)    produces: lines on the console    unblocked by: any worker"""
        inbox = await Inbox.open(self._board, BLOCKED, BLOCKED_MESSAGES)
        while True:
            for report in await inbox.read():
                self._blocked[report.worker] = (time.monotonic(), report)
                log.warning(str(report))

    @property
    def blocked(self) -> str:
        """What holds up the worker that was heard of last, in a sentence; empty when none was blocked lately."""
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
