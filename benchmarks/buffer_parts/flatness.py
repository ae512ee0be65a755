"""Measures whether an operation costs more with a million groups in the buffer, or with 64 workers instead of one.

Server time only: a script's time by the server's clock, and the server thread's time per group.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis

from async_rl.replay_protocol import Limits
from async_rl.types import RolloutGroup, Ticket, VersionRecord
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer_parts.groups import tiny, under
from buffer_parts.limit import command, connected, receive
from buffer_parts.script_log import script_log
from buffer_parts.server import server

RUN = "flatness"
SCRIPTS = ("reserve", "commit", "take", "release", "checkpoint", "stats")
WORKER = "worker"
STEP = 64
STEPS = 12
"""Steps at each size: enough for a median of the scripts that are called once a step."""
SENT_AT_ONCE = 200
TICKETS_AT_ONCE = 1000
ANY_VERSION = 2**31
FEW_WRITERS, MANY_WRITERS = 1, 64
PATIENCE_S = 60.0


# -- by the number of groups ------------------------------------------------------------------------------------------
def script_us_by_groups(sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return the median microseconds of each script by number of groups in the buffer; the sizes take turns."""
    return asyncio.run(_by_groups(sizes))


async def _by_groups(sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    async with AsyncExitStack() as stack:
        filled = {size: await stack.enter_async_context(_filled(size)) for size in sizes}
        with ExitStack() as logs:
            costs = {size: logs.enter_context(script_log(buffer.where)) for size, buffer in filled.items()}
            for _ in range(STEPS):
                for buffer in filled.values():
                    await buffer.one_step()
    return {size: {script: statistics.median(costs[size][script]) for script in SCRIPTS} for size in sizes}


@dataclass(slots=True)
class _Filled:
    """A buffer with many groups, and tickets older than theirs, whose groups are therefore taken first."""

    where: str
    buffer: RedisBuffer
    fence: int
    tickets: list[Ticket]
    step: int = 0

    async def one_step(self) -> None:
        rolled_out = tiny()
        tickets, self.tickets = self.tickets[:STEP], self.tickets[STEP:]
        for ticket in tickets:
            assert await self.buffer.commit(WORKER, under(ticket, rolled_out, WORKER)) == "stored"
        await _tickets(self.buffer, 8)
        self.step += 1
        taken = await self.buffer.take(self.fence, step=self.step, version=0, num_groups=STEP, wait_s=PATIENCE_S)
        assert {one.group.id for one in taken} == {ticket.id for ticket in tickets}
        await self.buffer.release(self.fence, self.step)
        await self.buffer.checkpoint(self.fence, self.step)
        await self.buffer.stats()


@asynccontextmanager
async def _filled(size: int) -> AsyncIterator[_Filled]:
    with server() as where:
        _never_rewrite(where)
        connection = Server(where)
        buffer = RedisBuffer(connection, RUN)
        fence = await _lead(buffer, groups_per_step=max(size, STEP * STEPS))
        filled = _Filled(where, buffer, fence, await _tickets(buffer, STEP * (1 + STEPS)))
        await filled.one_step()  # from here on the server has cached the scripts
        await _fill(where, buffer, size)
        yield filled
        await connection.close()


async def _lead(buffer: RedisBuffer, *, groups_per_step: int) -> int:
    limits = Limits(max_age=2, groups_per_step=groups_per_step, lease_s=3600, max_attempts=3, selector="windowed_fifo")
    fence = await buffer.acquire("flatness", limits)
    await buffer.recover(fence, None)
    assert await _publish(buffer, fence, step=0, after=-1) == 0
    return fence


async def _publish(buffer: RedisBuffer, fence: int, *, step: int, after: int) -> int:
    version = await buffer.issue(fence, after=after)
    await buffer.publish(fence, VersionRecord(version=version, timeline="flatness", step=step, digest=""))
    return version


async def _tickets(buffer: RedisBuffer, count: int) -> list[Ticket]:
    tickets: list[Ticket] = []
    while len(tickets) < count:
        some = min(TICKETS_AT_ONCE, count - len(tickets))
        tickets += await buffer.reserve(WORKER, version=ANY_VERSION, count=some, wait_s=PATIENCE_S)
    return tickets


class _Overhears:
    """Stands in for the server: records the commands of the last transaction instead of sending them."""

    def __init__(self) -> None:
        self.commands = self
        self.said: list[tuple[Any, ...]] = []

    async def ask(self, command: Any, **_options: Any) -> Any:
        return await command()

    def pipeline(self, **_options: Any) -> _Overhears:
        self.said = []
        return self

    def hsetnx(self, *words: Any) -> None:
        self.said.append(("HSETNX", *words))

    def eval(self, *words: Any) -> None:
        self.said.append(("EVAL", *words))

    async def execute(self) -> list[Any]:
        return [1, b"stored"]


async def _fill(where: str, buffer: RedisBuffer, count: int) -> None:
    """Commit `count` groups, many per send: one commit is recorded, and sent again with the other tickets' ids."""
    overhears = _Overhears()
    rolled_out = tiny()
    with connected(where) as connection:
        while count > 0:
            tickets = await _tickets(buffer, min(count, TICKETS_AT_ONCE))
            first = tickets[0].id
            await RedisBuffer(cast("Server", overhears), RUN).commit(WORKER, under(tickets[0], rolled_out, WORKER))
            template = b"".join(command(*map(_as_sent, words)) for words in overhears.said)
            commits = [template.replace(first.encode(), ticket.id.encode()) for ticket in tickets]
            for start in range(0, len(commits), SENT_AT_ONCE):
                some = commits[start : start + SENT_AT_ONCE]
                connection.sendall(b"".join(some))
                receive(connection, b":1\r\n$6\r\nstored\r\n" * len(some))
            count -= len(tickets)


def _as_sent(word: object) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _never_rewrite(where: str) -> None:
    """Disable rewrites of the append-only file: one would fork a server of a gigabyte, and each write would copy a page."""
    with Redis.from_url(where) as redis:
        redis.config_set("auto-aof-rewrite-percentage", 0)


# -- by the number of writers -----------------------------------------------------------------------------------------
def server_us_by_writers(steps: int) -> dict[int, float]:
    """Return the server's microseconds per group, from reservation to checkpoint; each worker has its own connections."""
    return {writers: asyncio.run(_by_writers(writers, steps)) for writers in (FEW_WRITERS, MANY_WRITERS)}


async def _by_writers(writers: int, steps: int) -> float:
    with server() as where:
        learner = Server(where)
        buffer = RedisBuffer(learner, RUN)
        fence = await _lead(buffer, groups_per_step=STEP)
        rolled_out = tiny()
        async with asyncio.TaskGroup() as fleet:
            workers = [fleet.create_task(_work(where, f"worker{index}", rolled_out)) for index in range(writers)]
            version = await _learn(buffer, fence, range(1, 3), 0)  # by then all workers are connected
            before = _busy_s(where)
            await _learn(buffer, fence, range(3, steps + 3), version)
            busy = _busy_s(where) - before
            for worker in workers:
                worker.cancel()
        await learner.close()
    return 1e6 * busy / (steps * STEP)


async def _work(where: str, worker: str, rolled_out: RolloutGroup) -> None:
    connection = Server(where)
    try:
        buffer = RedisBuffer(connection, RUN)
        while True:
            for ticket in await buffer.reserve(worker, version=ANY_VERSION, count=1, wait_s=PATIENCE_S):
                await buffer.commit(worker, under(ticket, rolled_out, worker))
    finally:
        await connection.close()


async def _learn(buffer: RedisBuffer, fence: int, steps: range, version: int) -> int:
    for step in steps:
        taken = await buffer.take(fence, step=step, version=version, num_groups=STEP, wait_s=PATIENCE_S)
        assert len(taken) == STEP
        version = await _publish(buffer, fence, step=step, after=version)
        await buffer.release(fence, step)
        await buffer.checkpoint(fence, step)
    return version


def _busy_s(where: str) -> float:
    with Redis.from_url(where) as redis:
        found = redis.info("cpu")
    return found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"]
