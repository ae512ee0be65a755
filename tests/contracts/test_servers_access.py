"""Each role does its work as its own user, and is told in a sentence what it may not do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from groups import group
from private_server import binaries, private_server
from runs import started

from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.protocols import Member
from buffer import keys
from buffer.access import ROLES, Created, create_users, list_users
from buffer.board import RedisBoard
from buffer.connecting import Credentials
from buffer.redis_buffer import RedisBuffer
from buffer.redis_client import Server


class People:
    """The users of a run, each with connections of its own."""

    def __init__(self, url: str, run: str, created: Created, stack: AsyncExitStack) -> None:
        self.run = run
        self.created = created
        self._url = url
        self._stack = stack

    def server(self, role: str, password: str | None = None) -> Server:
        own = self.created.password_files[role].read_text().strip()
        login = Credentials(user=self.created.users[role], password=password if password is not None else own)
        server = Server(self._url, credentials=login, patience_s=30)
        self._stack.push_async_callback(server.close)
        return server

    def buffer(self, role: str) -> RedisBuffer:
        return RedisBuffer(self.server(role), self.run)


@pytest.fixture(scope="module", params=binaries())
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with private_server(binaries()[request.param]) as url:
        yield url


@pytest.fixture
async def people(server_url: str, run_name: str, tmp_path: Path) -> AsyncIterator[People]:
    async with AsyncExitStack() as stack:
        admin = Server(server_url, patience_s=30)
        stack.push_async_callback(admin.close)
        yield People(server_url, run_name, await create_users(admin, run_name, folder=tmp_path / "users"), stack)


async def test_every_role_can_do_its_work(people: People):
    learner, worker, monitor = (people.buffer(role) for role in ("learner", "worker", "monitor"))
    fence = await started(learner)
    board = RedisBoard(people.server("worker"), people.run)
    await board.agree("worker", {"model": "m"})
    await board.announce(Member(id="w", host="h", version=-1, device="cpu"), 60)
    await board.post("metrics", {"worker": "w"})
    assert (await board.live_version()) is not None
    first, second, third = await worker.reserve("w", version=0, count=3, wait_s=1)
    assert await worker.renew("w", [first.id]) == set()
    assert [await worker.commit("w", group(ticket)) for ticket in (first, second)] == ["stored", "stored"]
    await worker.abandon("w", third.id, "abandoned")
    seen = RedisBoard(people.server("learner"), people.run)
    assert [member.id for member in await seen.members()] == ["w"]
    assert len(await seen.read("metrics", "0", 0)) == 1
    assert len(await learner.take(fence, step=1, version=0, num_groups=2, wait_s=1)) == 2
    position = await learner.position(fence, 1)
    await learner.checkpoint(fence, 1)
    await learner.recover(fence, position)
    assert (await monitor.stats()).spent == 2
    assert (await monitor.audit()).is_clean
    assert await monitor.quarantined() == []


EVERYBODY = ["FLUSHALL", "CONFIG GET maxmemory", "ACL LIST", "KEYS *", "SCAN 0", "HGETALL {other}:state", "SUBSCRIBE other"]
REFUSED: dict[str, list[str]] = {
    "worker": [*EVERYBODY, "SHUTDOWN", "SCRIPT FLUSH", "HSCAN {run}:records 0"],
    "learner": [*EVERYBODY, "MONITOR", "RESTORE {run}:state 0 x", "PUBLISH other x"],
    "monitor": [*EVERYBODY, "DEL {run}:state", "HSET {run}:state a b", "XADD {run}:topic:x * a b", "PUBLISH {run}:on:slots x"],
}


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_can_do_more_than_that(people: People, role: str):
    await started(people.buffer("learner"))
    server = people.server(role)
    redis: Any = server.commands
    for command in REFUSED[role]:
        words = command.replace("{run}", f"{{{people.run}}}").split()
        with pytest.raises(ConfigError, match="does not let its user do this"):
            await server.ask(lambda words=words: redis.execute_command(*words))


async def test_a_script_gives_nobody_more_rights(people: People):
    server = people.server("monitor")
    redis: Any = server.commands
    with pytest.raises(ConfigError, match="does not let its user do this"):
        await server.ask(lambda: redis.eval("return redis.call('DEL', KEYS[1])", 1, keys.state(people.run)))
    with pytest.raises(ConfigError, match="does not let its user do this"):
        await people.buffer("monitor").reserve("w", version=0, count=1, wait_s=0)


async def test_a_user_of_one_run_cannot_touch_another(people: People):
    foreign = RedisBuffer(people.server("learner"), "another-run")
    with pytest.raises(ConfigError, match="does not let its user do this"):
        await foreign.stats()


async def test_new_passwords_end_the_old_ones_and_lie_where_only_we_can_read(people: People, server_url: str, tmp_path: Path):
    old = people.created.password_files["worker"].read_text().strip()
    admin = people.server("worker")  # any connection made before goes on; the old password opens no new one
    await admin.ping()
    owner = Server(server_url)
    again = await create_users(owner, people.run, folder=tmp_path / "users")
    assert set(await list_users(owner, people.run)) == set(again.users.values())
    await owner.close()
    for path in (*again.password_files.values(), again.acl_file):
        assert path.stat().st_mode & 0o777 == 0o600
    assert again.password_files["worker"].read_text().strip() != old
    assert old not in again.acl_file.read_text()
    with pytest.raises(BufferUnreachable, match="refuses our password"):
        await people.server("worker", password=old).ping()
