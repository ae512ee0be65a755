"""Rank 0 of a replica serves the worker: requests in, answers out as they finish."""

from __future__ import annotations

import asyncio

from async_rl.config import HEARTBEAT_S
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas.frames import (
    CancelRequest,
    Generate,
    LoadWeights,
    MetricsReport,
    Refusal,
    RequestDone,
    messages,
    pack,
)
from rollout_workers.inference.replicas.shared_weights import SharedVersion, WeightReader


class EngineServer:
    def __init__(self, engine: MegatronEngine, reader: WeightReader, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._reader = reader
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
                    case Generate() | LoadWeights():
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

    async def _answer(self, request: Generate | LoadWeights) -> None:
        try:
            answer = RequestDone(id=request.id, completion=await self._do(request))
        except ValueError as error:
            answer = Refusal(id=request.id, kind=type(error).__name__, reason=str(error))
        await self._send(MetricsReport(metrics=self._engine.metrics))  # first: the receiver of the answer may read the metrics
        await self._send(answer)

    async def _do(self, request: Generate | LoadWeights) -> Completion | None:
        if isinstance(request, Generate):
            return await self._engine.generate(request.prompt, request.args)
        staged = await self._engine.stage(SharedVersion(request.parcels, self._reader))
        await self._engine.swap(request.version, staged)
        return None

    async def _send(self, message: object) -> None:
        self._writer.write(pack(message))
        await self._writer.drain()
