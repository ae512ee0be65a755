"""Faults of a server's files: truncated, corrupt, lost, restored from a backup; a full disk."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.errors import BufferUnreachable, RestartLimit, ServerRewound
from buffer import open_buffer
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.server import EmbeddedServer, find_binary
from tests.contracts.servers.lives import UP_TO_DATE, Learner, working
from tests.support.groups import group
from tests.support.private_server import client_of, private_folder, server_on, servers_to_test
from tests.support.runs import LEARNER_LEASE_S, limits, publish, started
from tests.support.waiting import PATIENCE_S, until

TORN_BYTES, TORN_STEP = 6144, 151
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Machine:
    """A server and its folder, which tests change while it is down."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.folder = folder
        self._binary = binary
        self._up = ExitStack()
        self.start()

    def start(self) -> None:
        self.url, self.process = self._up.enter_context(server_on(self._binary, self.folder))

    def kill(self) -> None:
        self._up.close()

    @property
    def data(self) -> Path:
        """Return the file that the latest changes were appended to."""
        [*_, last] = sorted([*self.folder.glob("appendonlydir/*.incr.aof"), *self.folder.glob("appendonly.aof")])
        return last

    def forget(self) -> None:
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)
        (self.folder / "appendonly.aof").unlink(missing_ok=True)

    def copy_to(self, copy: Path) -> None:
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("*.sock", "temp-*"))

    def put_back(self, copy: Path) -> None:
        self.forget()
        shutil.copytree(copy, self.folder, dirs_exist_ok=True)


@pytest.fixture(params=servers_to_test())
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with private_folder() as folder:
        machine = Machine(folder, servers_to_test()[request.param])
        yield machine
        machine.kill()


@pytest.fixture
def our_machine() -> Iterator[Machine]:
    with private_folder() as folder:
        machine = Machine(folder, find_binary(path=""))
        yield machine
        machine.kill()


@pytest.fixture
def connect(run_name: str) -> Iterator[Callable[..., tuple[Server, RedisBuffer]]]:
    def connect(machine: Machine, patience_s: float = 30) -> tuple[Server, RedisBuffer]:
        server = Server(machine.url, patience_s=patience_s)
        return server, RedisBuffer(server, run_name, learner_lease_s=LEARNER_LEASE_S)

    return connect


Connect = Callable[..., tuple[Server, RedisBuffer]]


async def state(buffer: RedisBuffer) -> tuple[object, ...]:
    found = await buffer.stats()
    return found.issued, found.reserved, found.ready, found.taken, found.spent, found.version, found.bytes


async def test_a_torn_end_gives_a_prefix_of_history(our_machine: Machine, connect: Connect):
    server, buffer = connect(our_machine)
    fence = await buffer.acquire("learner", limits())
    await buffer.recover(fence, None)
    history = {await state(buffer)}
    version = -1
    for step in range(1, 6):
        version = await publish(buffer, fence, after=version)
        history.add(await state(buffer))
        for ticket in await buffer.reserve("w", version=UP_TO_DATE, count=3, wait_s=0):
            history.add(await state(buffer))
            await buffer.commit("w", group(ticket))
            history.add(await state(buffer))
        await buffer.take(fence, step=step, version=version, num_groups=2, wait_s=0)
        history.add(await state(buffer))
        await buffer.release(fence, step)
        await buffer.checkpoint(fence, step)
        history.add(await state(buffer))
    await server.close()
    our_machine.kill()
    whole, seen = our_machine.data.read_bytes(), set[object]()
    for torn in range(0, min(TORN_BYTES, len(whole)), TORN_STEP):
        our_machine.data.write_bytes(whole[: len(whole) - torn])
        our_machine.start()
        server, buffer = connect(our_machine)
        audit = await buffer.audit()
        assert audit.is_clean, (torn, audit.problems)
        seen.add(found := await state(buffer))
        assert found in history, f"{torn} bytes off"
        await server.close()
        our_machine.kill()
    assert len(seen) > 5


async def test_a_server_that_was_emptied_under_the_run_is_noticed(our_machine: Machine, connect: Connect):
    await disturbed(our_machine, connect, at_rest=our_machine.forget)


async def test_an_old_copy_of_the_data_is_noticed(our_machine: Machine, connect: Connect, tmp_path: Path):
    copy = tmp_path / "copy"
    await disturbed(our_machine, connect, early=lambda: our_machine.copy_to(copy), at_rest=lambda: our_machine.put_back(copy))


async def test_a_checkpoint_never_takes_its_position_from_a_server_that_forgot_the_step(our_machine: Machine, connect: Connect):
    """It would list groups as outstanding that this checkpoint has trained."""
    server, buffer = connect(our_machine)
    redis: Any = server.commands
    fence = await started(buffer, groups_per_step=1)
    tickets = await buffer.reserve("w", version=UP_TO_DATE, count=3, wait_s=0)
    for ticket in tickets:
        await buffer.commit("w", group(ticket))
    before = {key: await redis.dump(key) for key in await redis.keys("*")}
    assert len(await buffer.take(fence, step=1, version=0, num_groups=1, wait_s=0)) == 1
    assert [ticket.number for ticket in (await buffer.position(fence, 1)).outstanding] == [1, 2]
    await redis.flushall()
    for key, value in before.items():
        await redis.restore(key, 0, value)
    with pytest.raises(ServerRewound):
        await buffer.position(fence, 1)
    await server.close()


async def disturbed(
    machine: Machine, connect: Connect, *, at_rest: Callable[[], None], early: Callable[[], None] = lambda: None
) -> None:
    """A run whose server is killed and comes back with other data still trains no group twice."""
    opened: list[Server] = []

    def open_one() -> RedisBuffer:
        server, buffer = connect(machine)
        opened.append(server)
        return buffer

    buffer = open_one()
    learner = Learner(buffer)
    async with working(open_one), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.train())
        await learner.advances(4)
        await asyncio.to_thread(early)
        await learner.advances(7)  # with checkpoints in between
        machine.kill()
        at_rest()
        machine.start()
        await learner.advances(10)
        learner.last = learner.step
    assert learner.restarts >= 1
    assert learner.trained_twice() == []
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    for server in opened:
        await server.close()


async def test_a_full_disk_makes_all_wait_and_nothing_is_lost(machine: Machine, connect: Connect, ear: Ear):
    server, buffer = connect(machine)
    hasty, impatient = connect(machine, patience_s=5)
    await impatient.stats()  # it is connected
    await started(buffer, groups_per_step=64)
    tickets = await buffer.reserve("w", version=0, count=64, wait_s=0)
    stored: list[str] = []
    resource.prlimit(machine.process.pid, resource.RLIMIT_FSIZE, (machine.data.stat().st_size + 4096, NO_LIMIT[1]))

    async def commit_all() -> None:
        for ticket in tickets:
            assert await buffer.commit("w", group(ticket)) == "stored"
            stored.append(ticket.id)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(commit_all())
        async with asyncio.timeout(PATIENCE_S):
            await ear.heard.wait()
        before = len(stored)
        assert before < len(tickets)
        with pytest.raises(BufferUnreachable, match="cannot write to its disk; free some space"):
            await impatient.renew("w", [tickets[0].id])
        assert len(stored) == before
        resource.prlimit(machine.process.pid, resource.RLIMIT_FSIZE, NO_LIMIT)
    assert stored == [ticket.id for ticket in tickets]
    # While an earlier fsync is in progress, the server delays writing what it confirmed by up to two seconds.
    with client_of(unix_socket_path=machine.url.removeprefix("unix://")) as client:
        await asyncio.to_thread(until, lambda: client.info("persistence")["aof_buffer_length"] == 0, "all is written")
    machine.kill()
    machine.start()
    assert (await buffer.stats()).ready == len(tickets)
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    await server.close()
    await hasty.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear, heard = Ear("cannot write to its disk"), logging.getLogger("buffer.server.client")
    heard.addHandler(ear)
    yield ear
    heard.removeHandler(ear)


class Ear(logging.Handler):
    """Sets an event when a message is logged."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.heard = asyncio.Event()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.heard.set()


def config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r", "folder": folder},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "even_digits"}],
        }
    )


async def test_nonsense_in_the_data_names_the_file_and_the_way_out(tmp_path: Path):
    async with EmbeddedServer(config(tmp_path)), open_buffer(config(tmp_path)) as buffer:
        await started(buffer)
        [kept] = await buffer.reserve("w", version=0, count=1, wait_s=0)
        await buffer.commit("w", group(kept))
    [data] = [*(config(tmp_path).redis_folder.rglob("*.incr.aof")), *config(tmp_path).redis_folder.glob("appendonly.aof")]
    with data.open("ab") as file:
        file.write(b"this is no command\r\n" * 3)
    with pytest.raises(RestartLimit, match=re.escape(f"{data} cannot be read to its end")) as found:
        async with EmbeddedServer(config(tmp_path)):
            pass
    # The command in the error message repairs the file.
    _, _, repair = str(found.value).partition("follows it): ")
    await asyncio.to_thread(subprocess.run, repair, shell=True, input=b"y\n", check=True, capture_output=True)
    async with EmbeddedServer(config(tmp_path)), open_buffer(config(tmp_path)) as buffer:
        assert (await buffer.stats()).ready == 1
        assert (await buffer.audit()).is_clean
