"""A run lives on one node of a Cluster, and follows its slot to another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from async_rl.errors import BufferUnreachable
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.programs import find_binary
from tests.contracts.servers.lives import Learner, working
from tests.support.private_fleet import Node, cluster_url, owner, private_cluster, replace_the_dead
from tests.support.runs import LEARNER_LEASE_S, started

Opener = Callable[[], RedisBuffer]


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Node]]:
    """Three masters, and a replica of each."""
    with private_cluster(find_binary(), replicas=3) as nodes:
        yield nodes


@pytest.fixture
async def open_buffer(cluster: list[Node], run_name: str) -> AsyncIterator[Opener]:
    servers: list[Server] = []

    def open_one() -> RedisBuffer:
        # One live node is enough to find the others.
        servers.append(Server(cluster_url(cluster[:1]), patience_s=30))
        return RedisBuffer(servers[-1], run_name, learner_lease_s=LEARNER_LEASE_S)

    yield open_one
    for server in servers:
        await server.close()


async def test_a_run_stays_on_the_node_that_owns_it(cluster: list[Node], open_buffer: Opener, run_name: str):
    buffer = open_buffer()
    await started(buffer)
    homes = [node for node in cluster[:3] if node.ask.dbsize()]
    assert owner(cluster, run_name) in homes
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems


async def test_the_run_goes_on_while_its_slot_moves_to_another_node(cluster: list[Node], open_buffer: Opener, run_name: str):
    buffer = open_buffer()
    learner = Learner(buffer)
    source = owner(cluster, run_name)
    target = next(node for node in cluster[:3] if node is not source)
    async with working(open_buffer), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.train())
        await learner.advances(5)
        await asyncio.to_thread(_move, run_name, source, target, cluster[:3])
        await learner.advances(10)
        learner.last = learner.step
    assert owner(cluster, run_name) is target
    assert (learner.trained_twice(), learner.restarts) == ([], 0)
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems


def _move(run: str, source: Node, target: Node, masters: list[Node]) -> None:
    """Move one slot, as redis-cli does."""
    slot = source.ask.execute_command("CLUSTER", "KEYSLOT", f"{{{run}}}:state")
    ids = {node.port: node.ask.execute_command("CLUSTER", "MYID").decode() for node in (source, target)}
    target.ask.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.ask.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    while keys := source.ask.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 2):
        source.ask.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source, *masters):
        node.ask.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])


async def test_a_plain_address_of_a_cluster_is_one_sentence(cluster: list[Node], run_name: str):
    node = next(node for node in cluster[:3] if node is not owner(cluster, run_name))
    server = Server(f"redis://127.0.0.1:{node.port}", patience_s=30)
    with pytest.raises(BufferUnreachable, match=r"does not own this run; write redis\+cluster://"):
        await RedisBuffer(server, run_name).stats()
    await server.close()


async def test_the_run_goes_on_when_the_node_that_owns_it_dies(cluster: list[Node], open_buffer: Opener, run_name: str):
    """Runs last, because it leaves the Cluster with one node less."""
    buffer = open_buffer()
    learner = Learner(buffer)
    dying = owner(cluster, run_name)
    async with working(open_buffer), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.train())
        await learner.advances(5)
        await asyncio.to_thread(dying.kill)
        await asyncio.to_thread(replace_the_dead, cluster)
        await learner.advances(10)
        learner.last = learner.step
    assert learner.trained_twice() == []
    assert owner(cluster, run_name) in cluster[3:]
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
