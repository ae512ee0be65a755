"""A master dies and Sentinels promote its replica: clients see a delay, or detect what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from async_rl.errors import BufferUnreachable
from async_rl.replay_protocol import ReplayBuffer
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.programs import find_binary
from tests.contracts.servers.lives import Learner, working
from tests.support.private_fleet import Node, private_sentinels, promote_the_replica, sentinel_url
from tests.support.runs import LEARNER_LEASE_S

Fleet = tuple[list[Node], list[Node]]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with private_sentinels(find_binary()) as started:
        yield started


@pytest.fixture
async def open_buffer(fleet: Fleet, run_name: str) -> AsyncIterator[Callable[[], ReplayBuffer]]:
    servers: list[Server] = []

    def open_one() -> ReplayBuffer:
        servers.append(Server(sentinel_url(fleet[1]), patience_s=30))
        return RedisBuffer(servers[-1], run_name, learner_lease_s=LEARNER_LEASE_S)

    yield open_one
    for server in servers:
        await server.close()


async def test_the_run_follows_the_master_to_its_replica(fleet: Fleet, open_buffer: Callable[[], ReplayBuffer]):
    (master, replica), sentinels = fleet
    buffer = open_buffer()
    learner = Learner(buffer)
    async with working(open_buffer) as handed_in, asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.train())
        await learner.advances(5)
        await asyncio.to_thread(master.kill)
        await asyncio.to_thread(promote_the_replica, sentinels)
        await learner.advances(10)
        learner.last = learner.step
    assert replica.ask.info("replication")["role"] == "master"
    assert learner.trained_twice() == []
    assert {ticket for ids in learner.trained.values() for ticket in ids} <= handed_in
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems


async def test_what_the_old_master_had_confirmed_and_the_new_one_never_heard_is_noticed(
    fleet: Fleet, open_buffer: Callable[[], ReplayBuffer]
):
    (master, replica), sentinels = fleet
    buffer = open_buffer()
    learner = Learner(buffer)
    async with working(open_buffer), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.train())
        await learner.advances(4)
        await asyncio.to_thread(replica.ask.replicaof, "127.0.0.1", 1)  # no server is there: replication stops
        await learner.advances(6)  # with a checkpoint in between
        await asyncio.to_thread(master.kill)
        await asyncio.to_thread(promote_the_replica, sentinels)
        await learner.advances(10)
        learner.last = learner.step
    assert learner.restarts >= 1
    assert learner.trained_twice() == []
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems


async def test_sentinels_that_know_no_such_master_are_one_sentence(fleet: Fleet):
    server = Server(sentinel_url(fleet[1]).replace("/main", "/other"), patience_s=0.3)
    with pytest.raises(BufferUnreachable, match=r"no Redis has answered at redis\+sentinel://.*/other"):
        await server.ping()
    await server.close()
