"""Results of evaluators on their way into the run's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_rl.board.evaluations import EVALUATIONS, EvaluationDone
from async_rl.config.evaluation import EvaluationConfig
from async_rl.types import VersionRecord
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.reporting.evaluations import Evaluations
from tests.support.waiting import PATIENCE_S


@asynccontextmanager
async def listening(board: MemoryBoard, settings: EvaluationConfig) -> AsyncIterator[Evaluations]:
    evaluations = Evaluations(board, settings)
    async with asyncio.TaskGroup() as tasks:
        service = tasks.create_task(evaluations.run())
        yield evaluations
        service.cancel()


async def say(board: MemoryBoard, step: int) -> None:
    record = VersionRecord(version=step + 3, timeline="a", step=step, digest="")
    result = EvaluationDone(record=record, metrics={"eval/counting/pass@1": step / 10})
    await board.post(EVALUATIONS, result.model_dump(mode="json"))


async def test_each_result_stands_in_one_row() -> None:
    board = MemoryBoard(MemoryBuffer())
    await say(board, 0)  # before this learner's life: in its predecessor's rows
    async with listening(board, EvaluationConfig(every=2)) as evaluations:
        assert evaluations.row() == {}
        waiting = asyncio.create_task(evaluations.wait_for_last(0, 5, asyncio.Event()))
        await asyncio.sleep(0)
        await say(board, 2)
        await say(board, 4)
        await waiting
        assert evaluations.row() == {"eval/counting/pass@1": 0.2, "eval/step": 2, "eval/version": 5}
        assert evaluations.row() == {"eval/counting/pass@1": 0.4, "eval/step": 4, "eval/version": 7}
        assert evaluations.row() == {}


async def test_the_end_waits_only_for_what_is_due_and_never_for_ever() -> None:
    board, stop = MemoryBoard(MemoryBuffer()), asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        async with listening(board, EvaluationConfig(every=0)) as never:
            await never.wait_for_last(0, 5, stop)
        async with listening(board, EvaluationConfig(every=10)) as not_yet:
            await not_yet.wait_for_last(10, 19, stop)
        async with listening(board, EvaluationConfig(every=2, wait_s=0.01)) as impatient:
            await impatient.wait_for_last(0, 5, stop)
        async with listening(board, EvaluationConfig(every=2)) as stopped:
            waiting = asyncio.create_task(stopped.wait_for_last(0, 5, stop))
            await asyncio.sleep(0)
            stop.set()
            await waiting
