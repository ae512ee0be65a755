"""A learner reduced to its end of the wire and workers that are processes, connected by pipes.

Every worker has several wires at once, each a model and a way for it to travel, which take turns in the same processes.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import structlog
import torch
from torch._C._distributed_c10d import TCPStore

from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.digest import specs_of
from async_rl.transport.receiving.receiver import WeightReceiver
from weights_parts.learner import Learner, learner
from weights_parts.models import Weights, num_bytes
from weights_parts.pipe_board import PipeBoard
from weights_parts.rivals import Rivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A wire between a learner and its workers."""

    name: str
    model: Callable[[], Weights]
    wire: WireConfig
    rival: Literal["", "flat", "one_by_one", "copy"] = ""
    """The method of `Rivals` that alternates with the pushes. Workers take part in all but the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    num_bytes: int
    pack_s: float
    digest_s: float
    push_s: float
    swap_s: float
    """The slowest worker's copy of the staged version into its engine."""
    rival_s: float


class Lane:
    """The learner's end of a way."""

    def __init__(self, way: Way, weights: Weights, board: PipeBoard, learner: Learner, rivals: Rivals) -> None:
        self._way, self._weights, self._board, self._learner, self._rivals = way, weights, board, learner, rivals
        self._position = "0"

    async def round(self, workers: int) -> Round:
        """Push a version to all workers, then run the rival."""
        pushed = await self._learner.push(self._weights, workers=workers)
        await self._learner.flip(pushed)
        swaps: list[float] = []
        while len(swaps) < workers:
            served = await self._board.read("served", self._position, 5.0)
            swaps += [message["swap_s"] for _, message in served]
            self._position = served[-1][0] if served else self._position
        rival_s = await asyncio.to_thread(getattr(self._rivals, self._way.rival), self._weights) if self._way.rival else 0.0
        size = num_bytes(self._weights)
        return Round(
            num_bytes=size,
            pack_s=pushed.pack_s,
            digest_s=pushed.digest_s,
            push_s=pushed.push_s,
            swap_s=max(swaps),
            rival_s=rival_s,
        )


@asynccontextmanager
async def fleet(ways: Sequence[Way], workers: int) -> AsyncIterator[Mapping[str, Lane]]:
    """By the names of the ways."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    pipes = {way.name: [multiprocessing.Pipe() for _ in range(workers)] for way in ways}
    processes = [
        spawn.Process(
            target=_worker,
            args=(ways, [pipes[way.name][number][1] for way in ways], number + 1, workers + 1, server.port),
            daemon=True,
        )
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        rivals = Rivals(server.port, 0, workers + 1)
        async with AsyncExitStack() as stack:
            yield {
                way.name: await stack.enter_async_context(_lane(way, [ours for ours, _ in pipes[way.name]], rivals))
                for way in ways
            }
    finally:
        for process in processes:
            process.kill()
            process.join()


@asynccontextmanager
async def _lane(way: Way, pipes: Sequence[Connection], rivals: Rivals) -> AsyncIterator[Lane]:
    weights, board = way.model(), PipeBoard(*pipes)
    async with learner(board, way.wire, weights) as end:
        yield Lane(way, weights, board, end, rivals)


def only_warnings() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def _worker(ways: Sequence[Way], pipes: Sequence[Connection], rank: int, size: int, port: int) -> None:
    only_warnings()
    torch.set_num_threads(1)
    asyncio.run(_serve(ways, pipes, Rivals(port, rank, size), f"worker-{rank}"))


async def _serve(ways: Sequence[Way], pipes: Sequence[Connection], rivals: Rivals, name: str) -> None:
    async with asyncio.TaskGroup() as services:
        for way, pipe in zip(ways, pipes, strict=True):
            services.create_task(_receive(way, PipeBoard(pipe), rivals, name))


async def _receive(way: Way, board: PipeBoard, rivals: Rivals, name: str) -> None:
    served = way.model()

    async def swap(version: int, arrived: Mapping[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        for name, tensor in served.items():
            tensor.copy_(arrived[name])
        await board.post("served", {"version": version, "swap_s": time.perf_counter() - started})
        if way.rival in ("flat", "one_by_one"):
            await asyncio.to_thread(getattr(rivals, way.rival), served)

    async with asyncio.TaskGroup() as services:
        services.create_task(board.listen())
        member = Member(id=name, host="localhost", version=-1, device="cpu")
        await WeightReceiver(board, await board.store(), member, specs_of(served), way.wire, lease_s=60).run(swap)
