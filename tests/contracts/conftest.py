"""The contract suite runs over the memory buffer and the bundled server; with SERVERS=all over every Redis or Valkey found."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from async_rl.protocols import Board
from async_rl.replay_protocol import ReplayBuffer
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from buffer.server.client import Server
from tests.support.private_fleet import cluster_url, private_cluster
from tests.support.private_server import binaries, every_server, private_server, servers_to_test
from tests.support.runs import LEARNER_LEASE_S, Run

MEMORY, CLUSTER = "memory", "cluster"


@pytest.fixture(scope="session", params=[MEMORY, *servers_to_test(), *([CLUSTER] if every_server() else [])])
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == MEMORY:
        yield MEMORY
    elif request.param == CLUSTER:
        with private_cluster(binaries()["bundled"]) as nodes:
            yield cluster_url(nodes)
    else:
        with private_server(binaries()[request.param]) as url:
            yield url


@pytest.fixture(autouse=True)
def torn_connections(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where connections are torn on purpose, redis-py leaves one to the garbage collector when its task is cancelled while it
    connects. It is collected here, and not in the middle of another test.
    """
    yield
    if "test_servers_" in request.module.__name__:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture
async def run(server_url: str, run_name: str) -> AsyncIterator[Run]:
    in_memory: dict[str, MemoryBuffer] = {}

    async def open_memory(name: str, learner_lease_s: float) -> ReplayBuffer:
        return in_memory.setdefault(name, MemoryBuffer(learner_lease_s=learner_lease_s))

    async with AsyncExitStack() as stack:

        async def open_redis(name: str, learner_lease_s: float) -> ReplayBuffer:
            server = Server(server_url, patience_s=100)
            stack.push_async_callback(server.close)
            return RedisBuffer(server, name, learner_lease_s=learner_lease_s)

        yield Run(open_memory if server_url == MEMORY else open_redis, run_name)


@pytest.fixture
async def board(server_url: str, run_name: str) -> AsyncIterator[tuple[Board, ReplayBuffer]]:
    """A board, and the buffer of the same run."""
    if server_url == MEMORY:
        buffer = MemoryBuffer()
        yield MemoryBoard(buffer), buffer
    else:
        server = Server(server_url, patience_s=100)
        yield RedisBoard(server, run_name), RedisBuffer(server, run_name)
        await server.close()


@pytest.fixture
async def redis_buffer(redis_server: str, run_name: str) -> AsyncIterator[tuple[RedisBuffer, Server]]:
    server = Server(redis_server, patience_s=100)
    yield RedisBuffer(server, run_name, learner_lease_s=LEARNER_LEASE_S), server
    await server.close()
