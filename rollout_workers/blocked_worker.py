"""What happens when code of an environment blocks a worker's event loop.

    after 5 s             report worker, environment, file and line on the board         (the learner's console shows it)
    after stall_limit_s   hand back the tickets and exit; the worker is restarted, and the environment paused for a while

This runs on the watchdog's thread with connections of its own, because the blocked loop's cannot be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field

import structlog

from async_rl.board.inbox import Inbox, post
from async_rl.board.worker_reports import BLOCKED, WorkerBlocked
from async_rl.errors import AsyncRLError, EnvironmentBlocked, FailureBudgetSpent, ServiceStopped
from async_rl.protocols import Board
from async_rl.replay_protocol import ReplayBuffer
from async_rl.supervision import Drain, LoopStall, stall_watchdog
from async_rl.supervision.liveness.watchdog import REPORT_AFTER_S
from rollout_workers.episodes.leaked_tasks import environment_of
from rollout_workers.limits.environment_limits import EnvironmentLimits

TELL_WITHIN_S = 10.0
"""Give up reporting when Redis does not answer within this."""
REMEMBERED_S = 3600.0
"""How long a blocked worker counts against its environment."""
LONGEST_PAUSE_S = 3600.0
JUST_NOW_S = 60.0
"""Older reports do not end the worker: the code may have been fixed and the run restarted since."""
TRIES = 3
"""Blocked workers after which an environment ends its workers, if no other environment is left."""

log = structlog.get_logger()

Connect = Callable[[], AbstractAsyncContextManager[tuple[ReplayBuffer, Board]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedWorker:
    """`watched` reports a blocked event loop and ends its worker; `tell` alone is a callback for `stall_watchdog`."""

    worker: str
    tickets: Callable[[], Collection[str]]
    connect: Connect
    """Open connections for the calling thread."""
    limit_s: float
    stop: Drain

    def watched(self) -> AbstractContextManager[None]:
        """Watch the running event loop while inside."""
        return stall_watchdog(min(REPORT_AFTER_S, self.limit_s), on_stall=self.tell, on_beat=self._watch)

    def tell(self, stall: LoopStall) -> None:
        log.warning(str(stall), environment=environment_of(stall.task))
        self._ask(lambda _, board: post(board, BLOCKED, self._report(stall, is_replaced=False)))

    def _watch(self, stall: LoopStall) -> None:
        """Raise what ends the process once the loop has been blocked for `limit_s`, or the worker is asked to stop."""
        if not stall.exceeds(self.limit_s) and not self.stop.was_asked:
            return
        report = self._report(stall, is_replaced=True)

        async def hand_back_tickets(buffer: ReplayBuffer, board: Board) -> None:
            await post(board, BLOCKED, report)
            for ticket in self.tickets():
                await buffer.abandon(self.worker, ticket, "abandoned")

        was_told = self._ask(hand_back_tickets)
        if report.environment and was_told:
            raise EnvironmentBlocked(f"{report}; the next worker pauses this environment")
        raise ServiceStopped(str(stall))

    def _report(self, stall: LoopStall, *, is_replaced: bool) -> WorkerBlocked:
        return WorkerBlocked(
            worker=self.worker,
            environment=environment_of(stall.task),
            place=str(stall.place),
            seconds=round(stall.seconds, 1),
            at=time.time(),
            is_replaced=is_replaced,
        )

    def _ask(self, say: Callable[[ReplayBuffer, Board], Awaitable[None]]) -> bool:
        """Return whether it could be reported."""

        async def connected() -> None:
            async with asyncio.timeout(TELL_WITHIN_S), self.connect() as (buffer, board):
                await say(buffer, board)

        try:
            asyncio.run(connected())
        except (AsyncRLError, TimeoutError, OSError, BaseExceptionGroup) as error:
            log.warning(f"cannot tell the run that this worker is blocked: {type(error).__name__}: {error}")
            return False
        return True


@dataclass(slots=True)
class BlockingEnvironments:
    """Pause environments that recently blocked workers of the run, longer each time."""

    board: Board
    limits: EnvironmentLimits
    _times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Times at which each environment blocked a worker."""

    async def run(self) -> None:
        """
        consumes: reports of blocked workers, older ones too (board.read)    waits for:    a report
        produces: pauses of environments (limits.block)                      unblocked by: any worker
        Raises FailureBudgetSpent.
        """
        inbox = await Inbox.open(self.board, BLOCKED, WorkerBlocked, from_start=True)
        while True:
            for report in await inbox.read():
                self._handle(report)

    def _handle(self, report: WorkerBlocked) -> None:
        age = time.time() - report.at
        if not report.is_replaced or not report.environment or age > REMEMBERED_S:
            return
        times = self._times.setdefault(report.environment, [])
        times.append(report.at)
        recent = [moment for moment in times if report.at - moment <= REMEMBERED_S]
        self._times[report.environment] = recent
        left_s = min(LONGEST_PAUSE_S, self.limits.settings.pause_s * 2 ** (len(recent) - 1)) - max(0.0, age)
        if left_s > 0:
            log.warning(
                f"an environment is paused for {left_s:.0f} s: it blocked a worker at {report.place}",
                environment=report.environment,
                times=len(recent),
            )
            self.limits.block(report.environment, left_s)
        if age < JUST_NOW_S:
            self._give_up_without_others(report)

    def _give_up_without_others(self, report: WorkerBlocked) -> None:
        played = self.limits.played()
        if report.environment in played and all(len(self._times.get(name, ())) >= TRIES for name in played):
            raise FailureBudgetSpent(
                f"environment {report.environment!r} has blocked its workers {TRIES} times, the last time at {report.place}, "
                "and there is no other that could be played: what blocks belongs into `await in_process(...)` or "
                "`asyncio.to_thread` (docs/episodes.md)"
            )
