"""Bytes between clients and server are delayed, cut or dropped, and every change still happens exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from async_rl.errors import BufferUnreachable
from async_rl.replay_protocol import BufferStats, ReplayBuffer
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.contracts.servers.lives import Learner, working
from tests.support.chaos_proxy import ChaosProxy, Direction
from tests.support.groups import group
from tests.support.runs import LEARNER_LEASE_S, limits, publish, started

REPLY_TIMEOUT_S = 0.5


class Fleet:
    """Clients of one server behind the same bad network."""

    def __init__(self, proxy: ChaosProxy, run: str, stack: AsyncExitStack) -> None:
        self.proxy = proxy
        self._run = run
        self._stack = stack

    def open(self, *, patience_s: float = 60, run: str = "") -> RedisBuffer:
        server = Server(self.proxy.url, patience_s=patience_s, reply_timeout_s=REPLY_TIMEOUT_S)
        self._stack.push_async_callback(server.close)
        return RedisBuffer(server, self._run + run, learner_lease_s=LEARNER_LEASE_S)

    async def train(self, steps: int, at: int = 0, fault: object = None) -> Learner:
        """Run this many steps of a fleet with `fault` after `at` steps, and check what must always hold."""
        buffer = self.open()
        learner = Learner(buffer)
        async with working(self.open) as handed_in, asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.train())
            if callable(fault):
                await learner.advances(at)
                fault()
            await learner.advances(steps)
            learner.last = learner.step
        assert (learner.trained_twice(), learner.restarts) == ([], 0)
        calm = replace(self.proxy.weather, tear=0, delay_s=(0, 0), drip=0)
        self.proxy.weather = calm
        audit = await buffer.audit()
        assert audit.is_clean, audit.problems
        assert {ticket for ids in learner.trained.values() for ticket in ids} <= handed_in
        return learner


@pytest.fixture
async def fleet(redis_server: str, run_name: str, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    seed = getattr(request, "param", 1)
    print(f"the network's seed is {seed}")
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(ChaosProxy(redis_server, seed=seed))
        yield Fleet(proxy, run_name, stack)


@pytest.mark.parametrize("fleet", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))], indirect=True)
async def test_connections_that_break_anywhere(fleet: Fleet):
    fleet.proxy.weather.tear = 0.04
    await fleet.train(40)
    assert fleet.proxy.resets > 20


async def test_all_connections_are_reset_at_once(fleet: Fleet):
    await fleet.train(20, at=5, fault=fleet.proxy.reset_all)


@pytest.mark.parametrize("ways", [["to_server"], ["to_client"], ["to_server", "to_client"]], ids="-".join)
async def test_a_connection_that_is_dead_without_being_closed(fleet: Fleet, ways: list[Direction]):
    await fleet.train(20, at=5, fault=lambda: fleet.proxy.silence(*ways))


async def test_a_slow_network(fleet: Fleet):
    fleet.proxy.weather.delay_s = (0.0, 0.02)
    fleet.proxy.weather.drip = 50
    await fleet.train(8)


async def test_every_first_reply_is_lost_and_everything_happens_once(fleet: Fleet):
    """The same life over a good network and over one that drops the first reply to every request."""
    sound = await _a_short_life(fleet.open(run="-sound"))
    seen: set[bytes] = set()

    def is_new(request: bytes) -> bool:
        known = request in seen
        seen.add(request)
        return not known

    fleet.proxy.weather.loses_reply = is_new
    assert await _a_short_life(fleet.open(run="-lossy")) == sound
    assert fleet.proxy.resets > 15


async def _a_short_life(buffer: ReplayBuffer) -> BufferStats:
    fence = await started(buffer)
    kept, empty, handed_back, failed, *rest = await buffer.reserve("w", version=0, count=6, wait_s=5)
    assert await buffer.renew("w", [ticket.id for ticket in rest]) == set()
    await buffer.commit("w", group(kept))
    await buffer.commit("w", group(empty), keep=False)
    await buffer.abandon("w", handed_back.id, "abandoned")
    await buffer.abandon("w", failed.id, "failed")
    for ticket in rest:
        await buffer.commit("w", group(ticket))
    assert len(await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=5)) == 2
    assert await publish(buffer, fence, after=0) == 1
    await buffer.release(fence, 1)
    position = await buffer.position(fence, 1)
    await buffer.checkpoint(fence, 1)
    assert [ticket.task_index for ticket in await buffer.reserve("w", version=1, count=3, wait_s=5)] == [2, 3, 6]
    await buffer.resign(fence)
    successor = await buffer.acquire("next", limits())
    await buffer.recover(successor, position)
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    return replace(audit.stats, fence=0)


async def test_a_network_that_never_recovers_ends_in_a_sentence(fleet: Fleet):
    buffer = fleet.open(patience_s=1)
    fleet.proxy.weather.tear = 1
    with pytest.raises(BufferUnreachable, match="no Redis has answered"):
        await buffer.stats()
