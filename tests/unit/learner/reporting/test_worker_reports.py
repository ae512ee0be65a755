"""What workers report, as lines on the learner's console: by cause, with a count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from structlog.testing import capture_logs

from async_rl.board.worker_reports import BLOCKED, NOTES, WorkerBlocked, WorkerNote
from async_rl.types import Failure
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.reporting.worker_reports import WorkerReports
from rollout_workers.episodes.failure_log import FailureLog


class WatchedBoard(MemoryBoard):
    """Says when a reader waits for more."""

    def __init__(self) -> None:
        super().__init__(MemoryBuffer())
        self.waits = asyncio.Event()

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, object]]]:
        if wait_s > 0 and not await super().read(topic, after, 0.0):
            self.waits.set()
        return await super().read(topic, after, wait_s)


@asynccontextmanager
async def reading(board: WatchedBoard) -> AsyncIterator[WorkerReports]:
    reports = WorkerReports(board)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(reports.run_notes()), tasks.create_task(reports.run_blocked())]
        await board.waits.wait()
        yield reports
        for task in running:
            task.cancel()


async def all_read(board: WatchedBoard) -> None:
    board.waits.clear()
    await board.waits.wait()


def note(worker: str, times: int) -> WorkerNote:
    return WorkerNote(worker=worker, environment="math", cause="episodes end with leaked tasks", detail="close", times=times)


async def test_a_cause_is_told_once_and_again_at_powers_of_ten_of_all_workers() -> None:
    board = WatchedBoard()
    with capture_logs() as said:
        async with reading(board):
            for one in (note("a", 1), note("b", 1), note("a", 10), note("b", 10), note("a", 100)):
                await board.post(NOTES, one.model_dump())
            await all_read(board)
    told = [line for line in said if line["event"] == "episodes end with leaked tasks"]
    assert [line["times"] for line in told] == [1, 11, 110]
    assert told[0]["environment"] == "math"


async def test_a_blocked_worker_explains_the_wait() -> None:
    board = WatchedBoard()
    async with reading(board) as reports:
        assert reports.blocked == ""
        blocked = WorkerBlocked(
            worker="w", environment="math", place="tasks.py:3 in reward", seconds=5.2, at=0, is_replaced=False
        )
        await board.post(BLOCKED, blocked.model_dump())
        await all_read(board)
        assert reports.blocked == "worker w is blocked by environment 'math' at tasks.py:3 in reward, for 5 s by now"


def test_a_worker_notes_each_cause_at_powers_of_ten() -> None:
    failures = FailureLog("w")
    for number in range(30):
        failed = Failure(boundary="reward", kind="KeyError", message=f"'{number}' (tasks.py:3)")
        failures.note(failed, environment="math", task=f"{number}")
        failures.note_leak("math", "leaked tasks", ["close"])
    notes = failures.take_notes()
    assert [(one.cause, one.times) for one in notes] == [
        ("episodes fail at reward with KeyError (tasks.py:3)", 1),
        ("episodes end with leaked tasks", 1),
        ("episodes fail at reward with KeyError (tasks.py:3)", 10),
        ("episodes end with leaked tasks", 10),
    ]
    assert failures.take_notes() == []
