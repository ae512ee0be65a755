"""Each role works as its own user, and gets a clear error for what it may not do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from async_rl.board import weight_requests
from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.protocols import Member
from async_rl.telemetry import WORKER_METRICS
from buffer import keys
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.run_in_redis import RunInRedis
from buffer.server.client import Server
from buffer.server.connections import Credentials
from buffer.server.scripts import NAMES, load_script
from buffer.server.users import ROLES, TOPICS, CreatedUsers, create_users, list_users
from tests.support.groups import group
from tests.support.private_server import private_server, servers_to_test
from tests.support.runs import started

FORBIDDEN = "does not let its user do this"
LEARNER, WORKERS, OPERATORS, EVERY_ROLE = {"learner"}, {"learner", "worker"}, {"learner", "operator"}, set(ROLES) - {"monitor"}

MAY_RUN: dict[str, set[str]] = {
    **dict.fromkeys(["acquire", "hold", "resign", "recover", "settle", "roll_again", "recovered"], LEARNER),
    **dict.fromkeys(["issue", "publish", "release", "position", "mark", "checkpoint", "set_limit"], LEARNER),
    **dict.fromkeys(["take", "refuse", "prioritize", "discard", "write_note", "undo"], LEARNER),
    **dict.fromkeys(["reserve", "agree"], WORKERS),
    **dict.fromkeys(["change_limits", "change_mix"], OPERATORS),
    # What only moves groups and members about.
    **dict.fromkeys(
        ["stats", "renew", "commit", "quarantine", "drop", "starve", "unwanted", "forget", "announce", "leave", "members"],
        EVERY_ROLE,
    ),
    "readmit": EVERY_ROLE,
    "post": EVERY_ROLE,  # the key is given: topics and stores are told apart below
    **dict.fromkeys(["store_set", "store_add"], WORKERS),
}
"""Script -> roles that may change something with it, on a server that separates roles. The monitor's scripts only read."""
MAY_WRITE: dict[str, set[str]] = {
    **dict.fromkeys(["learner", "versions", "on:learner"], LEARNER),
    **dict.fromkeys(["overrides", "mix"], OPERATORS),
    **dict.fromkeys(["facts", "requests", "waiting", "asked"], WORKERS),
    **dict.fromkeys(["state", "dropped", "leases", "reserved", "ready", "taken", "again", "kept", "lottery"], EVERY_ROLE),
    **dict.fromkeys(["weights", "records", "payloads", "redo", "ended", "quarantine", "quarantine_payloads"], EVERY_ROLE),
    **dict.fromkeys(["tally", "members", "member_facts", "on:slots", "on:ready", "on:events"], EVERY_ROLE),
    "topic:weights-to-workers": LEARNER,
    "note:packed": LEARNER,
    "note:configuration": LEARNER,
    "topic:weight-answers": LEARNER,
    "topic:weight-requests": OPERATORS,
    "topic:fleet-requests": OPERATORS,
    "topic:weights-to-learner": WORKERS,
    "topic:worker-metrics": WORKERS,
    "topic:evaluations": WORKERS,
    "topic:machines": WORKERS,
    "topic:one-that-comes-later": LEARNER,
    "store:wire:any": WORKERS,
    "store:ranks:any": LEARNER,
    "store:errands:any": LEARNER,
}


class People:
    """The users of a run, each with connections of its own."""

    def __init__(self, url: str, run: str, created: CreatedUsers, admin: Server, stack: AsyncExitStack) -> None:
        self.run = run
        self.created = created
        self.admin = admin
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


@pytest.fixture(scope="module", params=servers_to_test())
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with private_server(servers_to_test()[request.param]) as url:
        yield url


@pytest.fixture
async def people(server_url: str, run_name: str, tmp_path: Path) -> AsyncIterator[People]:
    async with AsyncExitStack() as stack:
        admin = Server(server_url, patience_s=30)
        stack.push_async_callback(admin.close)
        yield People(server_url, run_name, await create_users(admin, run_name, folder=tmp_path / "users"), admin, stack)


async def test_every_role_can_do_its_work(people: People):
    learner, worker, monitor, operator = (people.buffer(role) for role in ("learner", "worker", "monitor", "operator"))
    fence = await started(learner)
    board = RedisBoard(people.server("worker"), people.run)
    await board.agree("worker", {"model": "m"})
    await board.announce(Member(id="w", host="h", version=-1, device="cpu"), 60)
    await board.post(WORKER_METRICS, {"worker": "w"})
    assert (await board.live_version()) is not None
    first, second, third = await worker.reserve("w", version=0, count=3, wait_s=1)
    assert await worker.renew("w", [first.id]) == set()
    assert [await worker.commit("w", group(ticket)) for ticket in (first, second)] == ["stored", "stored"]
    await worker.abandon("w", third.id, "abandoned")
    seen = RedisBoard(people.server("learner"), people.run)
    assert [member.id for member in await seen.members()] == ["w"]
    assert len(await seen.read(WORKER_METRICS, "0", 0)) == 1
    learner.on_stale = lambda _: None  # so that it looks for stale groups, too
    assert len(await learner.take(fence, step=1, version=0, num_groups=2, wait_s=1)) == 2
    position = await learner.position(fence, 1)
    await learner.checkpoint(fence, 1)
    await learner.recover(fence, position)
    assert (await operator.change_mix("", "{}")) is not None
    await operator.change_limits({"max_age": 1})
    assert (await operator.stats()).fence == fence
    await RedisBoard(people.server("operator"), people.run).post(weight_requests.REQUESTS, {"action": "status"})
    assert (await worker.mix()) != ()
    assert (await monitor.stats()).spent == 2
    watched = RedisBoard(people.server("monitor"), people.run)
    assert [member.id for member in await watched.members_now()] == ["w"]
    assert len(await watched.read(WORKER_METRICS, "0", 0.0)) == 1
    assert (await monitor.audit()).is_clean
    assert await monitor.quarantined() == []


async def permitted(server: Server, command: Callable[[], Awaitable[Any]]) -> bool:
    """Whether the server let the user run it."""
    try:
        await server.ask(command)
    except ConfigError:  # "does not let its user do this"
        return False
    except ResponseError:
        return True
    return True


async def contents(people: People) -> dict[bytes, bytes]:
    redis: Any = people.admin.commands
    return {name: await redis.dump(name) for name in sorted(await redis.keys(keys.key(people.run, "*")))}


@pytest.mark.parametrize("role", ROLES)
async def test_every_script_is_for_the_roles_it_is_meant_for(people: People, role: str):
    """Run a script without arguments: if permitted, it fails with an error of its own, or does nothing."""
    assert set(MAY_RUN) == set(NAMES), "a script came or went: who may run it?"
    await started(people.buffer("learner"))
    server, before = people.server(role), await contents(people)
    entry = keys.group_store(people.run, "wire", "entry")
    topic = keys.topic(people.run, next(iter(TOPICS[role]), "x"))
    chosen = {"topic": topic, "note": keys.note(people.run, "packed"), "entry": entry, "entry_call": entry}
    redis, may = cast("Any", server.commands), set[str]()
    for name in NAMES:
        script = load_script(name)
        declared = RunInRedis(server, people.run).keys_of(script, chosen)
        if await permitted(server, lambda: redis.eval(script.text, len(declared), *declared)):  # noqa: B023
            may.add(name)
    if role == "monitor":
        assert await contents(people) == before
    elif people.created.separates_roles:
        assert may == {name for name, roles in MAY_RUN.items() if role in roles}


@pytest.mark.parametrize("role", ROLES)
async def test_every_key_is_written_by_the_roles_it_is_meant_for(people: People, role: str):
    names = {*keys.BY_CONSTANT.values()}.difference(keys.GIVEN)
    assert {name for name in MAY_WRITE if not name.startswith(("topic:", "note:", "store:"))} == names, (
        "a key came or went: who may write it?"
    )
    server = people.server(role)
    redis: Any = server.commands
    if not people.created.separates_roles:
        pytest.skip("this server cannot let a user read what it may not write")
    may = set[str]()
    for name in MAY_WRITE:
        if await permitted(server, lambda name=name: redis.hset(keys.key(people.run, name), "field", "value")):
            may.add(name)
    assert may == {name for name, roles in MAY_WRITE.items() if role in roles}


EVERYBODY = ["FLUSHALL", "CONFIG GET maxmemory", "ACL LIST", "KEYS *", "SCAN 0", "HGETALL {other}:state", "SUBSCRIBE other"]
REFUSED: dict[str, list[str]] = {
    "worker": [*EVERYBODY, "SHUTDOWN", "SCRIPT FLUSH", "HSCAN {run}:records 0"],
    "learner": [*EVERYBODY, "MONITOR", "RESTORE {run}:state 0 x", "PUBLISH other x"],
    "operator": [*EVERYBODY, "SHUTDOWN", "RESTORE {run}:state 0 x", "CONFIG SET dir /"],
    "monitor": [*EVERYBODY, "DEL {run}:state", "HSET {run}:state a b", "XADD {run}:topic:x * a b", "PUBLISH {run}:on:slots x"],
}


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_can_do_more_than_that(people: People, role: str):
    await started(people.buffer("learner"))
    server = people.server(role)
    redis: Any = server.commands
    for command in REFUSED[role]:
        words = command.replace("{run}", f"{{{people.run}}}").split()
        with pytest.raises(ConfigError, match=FORBIDDEN):
            await server.ask(lambda words=words: redis.execute_command(*words))


async def test_a_script_gives_no_user_more_rights(people: People):
    server = people.server("monitor")
    redis: Any = server.commands
    with pytest.raises(ConfigError, match=FORBIDDEN):
        await server.ask(lambda: redis.eval("return redis.call('DEL', KEYS[1])", 1, keys.key(people.run, "state")))
    with pytest.raises(ConfigError, match=FORBIDDEN):
        await people.buffer("monitor").reserve("w", version=0, count=1, wait_s=0)


async def test_a_user_of_one_run_cannot_touch_another(people: People):
    foreign = RedisBuffer(people.server("learner"), "another-run")
    with pytest.raises(ConfigError, match=FORBIDDEN):
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


@pytest.mark.parametrize("name", servers_to_test())
@pytest.mark.parametrize("default_off", [False, True])
async def test_a_server_that_loads_the_acl_file_lets_in_its_administrators_and_the_runs_users(
    name: str, default_off: bool, run_name: str, tmp_path: Path
):
    loaded = tmp_path / "server.acl"
    loaded.touch()
    with private_server(servers_to_test()[name], "--aclfile", str(loaded)) as url:
        async with AsyncExitStack() as stack:

            def server(user: str = "", password: str = "") -> Server:
                opened = Server(url, credentials=Credentials(user=user, password=password), patience_s=5)
                stack.push_async_callback(opened.close)
                return opened

            async def acl(on: Server, *words: str) -> None:
                await on.ask(lambda: cast("Any", on.commands).execute_command("ACL", *words))

            owner = server()
            await acl(owner, "SETUSER", "chief", "on", ">other", "~*", "&*", "+@all")
            await acl(owner, "SETUSER", "default", "resetpass", ">secret")
            chief = server("chief", "other")
            created = await create_users(chief, run_name, folder=tmp_path / "users", default_off=default_off)
            assert not created.default_is_open
            loaded.write_text(created.acl_file.read_text())
            await acl(chief, "LOAD")

            await acl(server("chief", "other"), "WHOAMI")
            await server(created.users["learner"], created.password_files["learner"].read_text().strip()).ping()
            with pytest.raises(BufferUnreachable, match="password"):
                await server().ping()
            if default_off:
                with pytest.raises(BufferUnreachable, match="refuses our password"):
                    await server("default", "secret").ping()
            else:
                await acl(server("default", "secret"), "WHOAMI")


@pytest.mark.parametrize("more", [(), ("--default-off",)])
async def test_who_makes_the_users_hears_what_is_open(people: People, server_url: str, tmp_path: Path, more: tuple[str, ...]):
    settings = ("--redis.url", server_url, "--run.name", people.run, "--run.folder", str(tmp_path))
    words = ("users", "create", "@", "configs/quickstart.yaml", *settings, *more)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "buffer", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    page = (await process.communicate())[0].decode()
    facts: Any = await people.admin.ask(lambda: cast("Any", people.admin.commands).info("server"))
    can_separate = "valkey_version" in facts or int(facts["redis_version"].split(".")[0]) >= 7
    assert process.returncode == 0, page
    assert ("roles are not separated" in page) == (not can_separate) == (not people.created.separates_roles)
    written = (tmp_path / people.run / "users" / "users.acl").read_text()
    assert ("user default off\n" in written) == ("has no default user" in page) == bool(more)
    assert ("everyone who connects to this server is its administrator" in page) == (not more)
