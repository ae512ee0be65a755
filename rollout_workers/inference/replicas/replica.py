"""The worker's side of one replica: its rank processes and its unanswered requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from async_rl.errors import AsyncRLError, ConfigError, ServiceStopped
from async_rl.launch.commands import command
from async_rl.protocols import ContextOverflow
from async_rl.supervision import Child, ChildSpec, FatalExit, RestartPolicy, how_it_ended
from rollout_workers.inference.replicas.frames import (
    Broken,
    CancelRequest,
    EngineReady,
    Generate,
    LoadWeights,
    MetricsReport,
    Refusal,
    RequestDone,
    messages,
    pack,
)
from rollout_workers.inference.replicas.setup import RankSetup
from rollout_workers.inference.rollout_engine import EngineMetrics

_ERRORS: Mapping[str, type[Exception]] = {kind.__name__: kind for kind in (ContextOverflow, ValueError, ConfigError)}
"""Errors of a rank that are raised here as they are; others become ServiceStopped."""


class Replica:
    """`run` starts and supervises the processes; `ready` is done once they serve; `kill` ends them, and with them `run`."""

    def __init__(
        self, name: str, ranks: Sequence[RankSetup], environment: Mapping[str, str], on_loss: Callable[[AsyncRLError], None]
    ) -> None:
        """`on_loss` is called with the reason when a process ends without `kill`."""
        self.metrics: EngineMetrics | None = None
        """Metrics of the last report."""
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._on_loss = on_loss
        self._is_killed = False
        self._last_words: Exception | None = None
        self._all_heard = asyncio.Event()
        """Set once all messages of rank 0 have been read."""
        self._waiting: dict[int, asyncio.Future[RequestDone]] = {}
        """Unanswered requests, by id."""
        self._own_end, rank_0 = socket.socketpair()
        pairs = [socket.socketpair() for _ in ranks[1:]]
        downward = [[leads for leads, _ in pairs], *([] for _ in pairs)]
        upward = [rank_0, *(follows for _, follows in pairs)]
        self._children = [
            _child(f"{name}, rank {setup.rank}", setup, up, down, environment)
            for setup, up, down in zip(ranks, upward, downward, strict=True)
        ]

    async def run(self) -> None:
        """Run until all its processes have ended."""
        reader, self._writer = await asyncio.open_connection(sock=self._own_end)
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(self._keep(child), name=child.spec.name)
                await self._listen(reader)
                self._all_heard.set()
        finally:
            self._writer.close()
            with suppress(ConnectionError):  # the process closed it first
                await self._writer.wait_closed()

    def kill(self) -> None:
        self._is_killed = True
        for child in self._children:
            child.kill()

    def ask(self, request: Generate | LoadWeights) -> asyncio.Future[RequestDone]:
        """Send a request. The future holds its answer, or a refusal as an exception."""
        waiting: asyncio.Future[RequestDone] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = waiting
        self._writer.write(pack(request))
        return waiting

    def cancel(self, request: Generate) -> None:
        if self._waiting.pop(request.id, None) is not None and not self._is_killed:
            self._writer.write(pack(CancelRequest(id=request.id)))

    def release(self, error: BaseException) -> None:
        """Fail all unanswered requests with `error`."""
        for waiting in (self.ready, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # retrieved, because the caller may have left

    async def _keep(self, child: Child) -> None:
        try:
            status = await child.supervise()
        except FatalExit as fatal:
            status = fatal.status
        if child is self._children[0]:
            await self._all_heard.wait()
        if not self._is_killed:
            self._on_loss(self._loss(child, status))

    def _loss(self, child: Child, status: int) -> AsyncRLError:
        words = self._last_words
        if isinstance(words, ConfigError):  # wrong on every rank, whichever ends first
            return words
        what = f"the inference engine broke: {child.spec.name} {how_it_ended(status)}"
        return ServiceStopped(f"{what}: {words}" if words is not None and child is self._children[0] else what)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """
        consumes: messages of rank 0   waits for:    a message
        produces: answers (ask)        unblocked by: rank 0, also by ending
        """
        async for message in messages(reader):
            match message:
                case RequestDone() | Refusal():
                    self._settle(message)
                case MetricsReport():
                    self.metrics = message.metrics
                case EngineReady():
                    if not self.ready.done():
                        self.ready.set_result(message)
                case Broken():
                    self._last_words = _error(message)
                case _:
                    raise TypeError(f"rank 0 sent an unknown message: {message!r}")

    def _settle(self, message: RequestDone | Refusal) -> None:
        waiting = self._waiting.pop(message.id, None)
        if waiting is None or waiting.done():  # its caller left
            return
        if isinstance(message, RequestDone):
            waiting.set_result(message)
        else:
            waiting.set_exception(_error(message))


def _child(
    name: str, setup: RankSetup, up: socket.socket, down: Sequence[socket.socket], environment: Mapping[str, str]
) -> Child:
    sockets = [end.fileno() for end in (up, *down)]
    spec = ChildSpec(
        name=name,
        command=command("rollout_workers.inference.replicas.rank", [setup.model_dump_json(), *map(str, sockets)]),
        environment=environment,
        log=None,  # the worker's own log
        policy=RestartPolicy(limit=0),  # a restarted rank lacks the state of the others
        inherits=sockets,
    )

    def close_copies(*_: object) -> None:
        """Close our copies once the process has inherited the sockets, or its end would not be seen."""
        for end in (up, *down):
            end.close()

    return Child(spec, on_start=close_copies)


def _error(message: Refusal | Broken) -> Exception:
    return _ERRORS.get(message.kind, ServiceStopped)(message.reason)
