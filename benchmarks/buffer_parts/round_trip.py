"""The buffer's round trip: reserve, commit, take, issue, publish, release, checkpoint, with a window of versions."""

from __future__ import annotations

import asyncio

from rivals.rollouts import Portions, rollouts_per_s

from async_rl.replay_protocol import Limits
from async_rl.types import RolloutGroup, VersionRecord
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer_parts.groups import group, under
from buffer_parts.server import server

RUN = "benchmark"
GROUPS_PER_STEP = 64
LIMITS = Limits(max_age=2, groups_per_step=GROUPS_PER_STEP, lease_s=60, max_attempts=3, selector="windowed_fifo")
WRITERS = 2
"""Number of workers: one less leaves the learner idle, one more only competes for the same two cores."""
EPISODES = 4
"""Concurrent commits of a worker."""
TICKETS_AT_ONCE = 4
ANY_VERSION = 2**31
"""The version that workers report: never behind the live one."""
WAIT_S = 30.0


def round_trip_per_s(tokens: int, groups: int) -> float:
    with server() as where:
        return rollouts_per_s(write, read, where, tokens=tokens, groups=groups, writers=WRITERS)


def write(where: str, name: str, tokens: int, portions: Portions) -> None:
    asyncio.run(_write(where, name, tokens, portions))


def read(where: str, tokens: int, portions: Portions) -> None:
    asyncio.run(_read(where, tokens, portions))


async def _write(where: str, name: str, tokens: int, portions: Portions) -> None:
    rolled_out = group(tokens, seed=0)
    connection = Server(where)
    buffer = RedisBuffer(connection, RUN)
    for count in portions:
        async with asyncio.TaskGroup() as episodes:
            for index in range(EPISODES):
                episodes.create_task(_commit(buffer, f"{name}.{index}", rolled_out, count // EPISODES))
    await connection.close()


async def _commit(buffer: RedisBuffer, worker: str, rolled_out: RolloutGroup, count: int) -> None:
    while count > 0:
        for ticket in await buffer.reserve(worker, version=ANY_VERSION, count=min(count, TICKETS_AT_ONCE), wait_s=WAIT_S):
            answer = await buffer.commit(worker, under(ticket, rolled_out, worker))
            assert answer == "stored", answer
            count -= 1


async def _read(where: str, tokens: int, portions: Portions) -> None:
    connection = Server(where)
    buffer = RedisBuffer(connection, RUN)
    fence = await buffer.acquire("benchmark", LIMITS)
    await buffer.recover(fence, None)
    version = await _publish(buffer, fence, step=0, after=-1)
    step = 0
    for count in portions:
        for _ in range(count // GROUPS_PER_STEP):
            step += 1
            taken = await buffer.take(fence, step=step, version=version, num_groups=GROUPS_PER_STEP, wait_s=WAIT_S)
            assert len(taken) == GROUPS_PER_STEP, f"{len(taken)} groups were ready after {WAIT_S:g} s"
            for one in taken:
                assert all(len(rollout.samples[0].token_ids) == tokens for rollout in one.group.rollouts)
            version = await _publish(buffer, fence, step=step, after=version)
            await buffer.release(fence, step)
            await buffer.checkpoint(fence, step)
    await connection.close()


async def _publish(buffer: RedisBuffer, fence: int, *, step: int, after: int) -> int:
    version = await buffer.issue(fence, after=after)
    await buffer.publish(fence, VersionRecord(version=version, timeline="benchmark", step=step, digest=""))
    return version
