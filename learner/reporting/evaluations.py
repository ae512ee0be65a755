"""Results of evaluators, added to the run's metrics: each once, in the row of the next step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from async_rl.board.evaluations import EVALUATIONS, EvaluationDone
from async_rl.board.inbox import Inbox
from async_rl.config.evaluation import EvaluationConfig
from async_rl.protocols import Board

log = structlog.get_logger("learner")

UNREAD = 100
"""Results kept until a row shows them; older ones are dropped (the run's folder eval/ has all)."""


class Evaluations:
    def __init__(
        self, board: Board, settings: EvaluationConfig, *, on_result: Callable[[EvaluationDone], None] = lambda _: None
    ) -> None:
        self._on_result = on_result
        self._board = board
        self._settings = settings
        self._unreported: deque[EvaluationDone] = deque(maxlen=UNREAD)
        self._newest_step = -1
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """consumes: results (board.read)    produces: rows (`row`)    unblocked by: any evaluator"""
        inbox = await Inbox.open(self._board, EVALUATIONS, EvaluationDone)
        while True:
            for result in await inbox.read():
                self._on_result(result)
                async with self._news:
                    self._unreported.append(result)
                    self._newest_step = max(self._newest_step, result.record.step)
                    self._news.notify_all()

    def row(self) -> dict[str, float]:
        """Return the oldest result that no row has shown yet, or an empty row."""
        if not self._unreported:
            return {}
        result = self._unreported.popleft()
        return {**result.metrics, "eval/step": result.record.step, "eval/version": result.record.version}

    async def wait_for_last(self, first: int, last: int, stop: asyncio.Event) -> None:
        """Wait after the last step for the last evaluation due in steps first + 1 ... last, for at most `evaluation.wait_s`."""
        every = self._settings.every
        due = last - last % every if every else 0
        if due <= first or self._newest_step >= due or stop.is_set():
            return
        log.info(f"waits up to {self._settings.wait_s:g} s for the evaluation of step {due}")
        try:
            async with asyncio.timeout(self._settings.wait_s), asyncio.TaskGroup() as tasks:
                either = [
                    tasks.create_task(self._until(due), name="evaluation"),
                    tasks.create_task(stop.wait(), name="stop"),
                ]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                for one in either:
                    one.cancel()
        except TimeoutError:
            log.warning(f"step {due} was not evaluated in time; raise evaluation.wait_s, or see the evaluator's log")

    async def _until(self, step: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._newest_step >= step)
