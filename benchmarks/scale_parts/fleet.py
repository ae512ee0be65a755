"""The control traffic of rollout workers: the real clients, messages and intervals, without models, episodes and weights."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from buffer_parts.groups import tiny, under

from async_rl.board.inbox import Inbox, post
from async_rl.board.worker_reports import BLOCKED, WorkerBlocked
from async_rl.config import HEARTBEAT_S
from async_rl.protocols import Member
from async_rl.telemetry import WORKER_METRICS
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    PushBegin,
    PushOffer,
    PushReady,
    PushStaged,
    ToWorkers,
    VersionLive,
    WorkerHello,
)
from async_rl.types import Ticket
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from rollout_workers.worker import WAITED_HEARTBEATS

RUN = "scale"
MEMBER_HEARTBEATS = 10
"""A worker that sends none for so long is no member."""
COUNTERS = {f"counter/{number}": float(number) for number in range(24)}
"""As many as a worker posts."""
GROUP = tiny()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What each worker does."""

    group_s: float
    """A group takes that long."""
    in_flight: int
    """Groups that a worker rolls out at once."""
    heartbeat_s: float = HEARTBEAT_S


class LoadWorker:
    """Talks like a worker and its weight receiver."""

    def __init__(self, name: str, pattern: Pattern, buffer: RedisBuffer, board: RedisBoard) -> None:
        self._name, self._pattern, self._buffer, self._board = name, pattern, buffer, board
        self._member = Member(id=name, host="host", version=-1, device="cpu")
        self._held: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._live = asyncio.Event()
        self._reserving: asyncio.Timeout | None = None

    async def run(self) -> None:
        inbox = await Inbox[ToWorkers].open(self._board, TO_WORKERS, TO_WORKERS_MESSAGES)
        await self._announce()
        await post(self._board, TO_LEARNER, WorkerHello(member=self._name))
        await asyncio.sleep(random.uniform(0, self._pattern.heartbeat_s))  # workers do not start at the same moment
        async with asyncio.TaskGroup() as tasks:
            services = (
                self._reserve(tasks),
                self._renew(),
                self._beat(),
                self._post_metrics(),
                self._follow(inbox),
                self._reports(),
            )
            for service in services:
                tasks.create_task(service)

    async def _announce(self) -> None:
        await self._board.announce(self._member, MEMBER_HEARTBEATS * self._pattern.heartbeat_s)

    async def _reserve(self, tasks: asyncio.TaskGroup) -> None:
        await self._live.wait()
        while True:
            while len(self._held) >= self._pattern.in_flight:
                self._changed.clear()
                await self._changed.wait()
            for ticket in await self._tickets(self._pattern.in_flight - len(self._held)):
                self._held[ticket.id] = tasks.create_task(self._roll_out(ticket))

    async def _tickets(self, count: int) -> list[Ticket]:
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._reserving = waiting
                return await self._buffer.reserve(
                    self._name, version=self._member.version, count=count, wait_s=WAITED_HEARTBEATS * self._pattern.heartbeat_s
                )
        except TimeoutError:
            return []
        finally:
            self._reserving = None

    async def _roll_out(self, ticket: Ticket) -> None:
        await asyncio.sleep(random.uniform(0.8, 1.2) * self._pattern.group_s)
        await self._buffer.commit(self._name, under(ticket, GROUP, self._name))
        del self._held[ticket.id]
        self._changed.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._pattern.heartbeat_s)
            if self._held:
                await self._buffer.renew(self._name, list(self._held))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._pattern.heartbeat_s)
            await self._announce()

    async def _post_metrics(self) -> None:
        while True:
            await asyncio.sleep(self._pattern.heartbeat_s)
            await self._board.post(WORKER_METRICS, {"worker": self._name, "counters": COUNTERS, "time": 0.0, "boot": "boot"})

    async def _reports(self) -> None:
        inbox = await Inbox.open(self._board, BLOCKED, WorkerBlocked, from_start=True)
        while True:
            await inbox.read()

    async def _follow(self, inbox: Inbox[ToWorkers]) -> None:
        while True:
            for message in await inbox.read():
                match message:
                    case PushOffer() if self._name in message.to:
                        await self._board.fence()
                        await self._board.note("packed")
                        await post(self._board, TO_LEARNER, PushReady(**self._reply_to(message), by_memory=()))
                    case PushBegin():
                        await post(self._board, TO_LEARNER, PushStaged(**self._reply_to(message)))
                    case VersionLive():
                        await self._serve(message.record.version)
                    case _:
                        pass

    async def _serve(self, version: int) -> None:
        self._member = replace(self._member, version=version)
        await self._announce()
        self._live.set()
        if self._reserving is not None:
            self._reserving.reschedule(asyncio.get_running_loop().time())

    def _reply_to(self, message: PushOffer | PushBegin) -> dict[str, Any]:
        return {"fence": message.fence, "generation": message.generation, "member": self._name}


async def _run(url: str, names: Sequence[str], pattern: Pattern) -> None:
    async with AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
        for name in names:
            servers = Server(url), Server(url)
            for server in servers:
                opened.push_async_callback(server.close)
            buffer, board = servers
            tasks.create_task(LoadWorker(name, pattern, RedisBuffer(buffer, RUN), RedisBoard(board, RUN)).run())


def main() -> None:
    """ADDRESS FIRST COUNT GROUP_S IN_FLIGHT HEARTBEAT_S"""
    url, first, count, group_s, in_flight, heartbeat_s = sys.argv[1:]
    names = [f"node{number // 8:04d}-{4_000 + number}-{number:06x}" for number in range(int(first), int(first) + int(count))]
    asyncio.run(_run(url, names, Pattern(group_s=float(group_s), in_flight=int(in_flight), heartbeat_s=float(heartbeat_s))))


if __name__ == "__main__":
    main()
