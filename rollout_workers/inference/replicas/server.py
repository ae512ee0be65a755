"""Rank 0 of a replica serves the worker: requests in, answers out as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from torch import Tensor

from async_rl.config import HEARTBEAT_S
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas.frames import (
    CancelRequest,
    Generate,
    MetricsReport,
    Refusal,
    RequestDone,
    Swap,
    messages,
    pack,
)


class EngineServer:
    def __init__(self, engine: MegatronEngine, weights: Mapping[str, Tensor], writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._weights = weights
        self._writer = writer
        self._working: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """
        consumes: requests           waits for:    a message
        produces: answers, refusals  unblocked by: the worker, also by ending
        """
        async with asyncio.TaskGroup() as tasks:
            async for request in messages(reader):
                match request:
                    case CancelRequest() if (task := self._working.get(request.id)) is not None:
                        task.cancel()
                    case Generate() | Swap():
                        self._working[request.id] = tasks.create_task(self._answer(request))
                        self._working[request.id].add_done_callback(lambda _, id=request.id: self._working.pop(id))
                    case _:
                        pass  # Cancel of a request that is answered already
            for task in self._working.values():
                task.cancel()

    async def report(self) -> None:
        """Service: send the engine's metrics, every heartbeat."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._send(MetricsReport(metrics=self._engine.metrics))

    async def _answer(self, request: Generate | Swap) -> None:
        try:
            answer = RequestDone(id=request.id, completion=await self._do(request))
        except ValueError as error:
            answer = Refusal(id=request.id, kind=type(error).__name__, reason=str(error))
        await self._send(MetricsReport(metrics=self._engine.metrics))  # first: the receiver of the answer may read the metrics
        await self._send(answer)

    async def _do(self, request: Generate | Swap) -> Completion | None:
        if isinstance(request, Generate):
            return await self._engine.generate(request.prompt, request.args)
        await self._engine.swap(request.version, await self._engine.stage(self._weights))
        return None

    async def _send(self, message: object) -> None:
        self._writer.write(pack(message))
        await self._writer.drain()
