"""Failures of a server: corrupt payloads, no memory, lost replies, a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.config import Config
from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import RolloutGroup
from buffer import keys, open_board, open_buffer
from buffer.redis_buffer import RedisBuffer
from buffer.run_in_redis import RunInRedis
from buffer.server.client import Server
from buffer.server.embedded.server import EmbeddedServer, find_binary
from tests.support.groups import group
from tests.support.private_server import private_folder, private_server
from tests.support.runs import LEARNER_LEASE_S, publish, started

Both = tuple[RedisBuffer, Server]


async def committed(buffer: ReplayBuffer, count: int) -> list[str]:
    tickets = await buffer.reserve("w", version=0, count=count, wait_s=0)
    for ticket in tickets:
        await buffer.commit("w", group(ticket))
    return [ticket.id for ticket in tickets]


@pytest.mark.parametrize(
    "poison", [b"", b"ARLG", b"\x80\x04K\x01.", None, "swap"], ids=["empty", "short", "pickle", "gone", "swapped"]
)
async def test_a_poisoned_payload_is_replaced_by_another_group(redis_buffer: Both, run_name: str, poison: object):
    buffer, server = redis_buffer
    fence = await started(buffer)
    ids = await committed(buffer, 3)
    redis, payloads = cast("Any", server.commands), keys.key(run_name, "payloads")
    if poison is None:
        await redis.hdel(payloads, ids[0])
    else:
        await redis.hset(payloads, ids[0], poison if poison != "swap" else await redis.hget(payloads, ids[2]))
    batch = await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
    assert [entry.group.id for entry in batch] == ids[1:]
    assert (await buffer.stats()).quarantined == 1
    [report] = await buffer.quarantined()
    assert report["ticket"] == ids[0]
    assert report["reason"]
    [again] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    assert (again.task_index, again.attempt) == (0, 2)


@pytest.mark.parametrize("who", ["worker", "learner"])
async def test_token_ids_beyond_the_vocabulary_are_refused(redis_buffer: Both, who: str):
    buffer, _ = redis_buffer
    fence = await started(buffer)
    [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
    if who == "worker":
        buffer.vocab_size = 3
    assert await buffer.commit("w", group(ticket)) == ("quarantined" if who == "worker" else "stored")
    buffer.vocab_size = 3
    assert await buffer.take(fence, step=1, version=0, num_groups=1, wait_s=0) == []
    [report] = await buffer.quarantined()
    assert "vocabulary" in report["reason"]


async def test_a_lost_reply_to_a_reservation_loses_no_slot(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    await started(buffer)
    run = RunInRedis(server, run_name)
    first = await run.run_script("reserve", "w", "request-1", 0, 2, 0)
    assert await run.run_script("reserve", "w", "request-1", 0, 2, 0) == first
    assert (await buffer.stats()).reserved == 2
    assert await run.run_script("reserve", "w", "request-2", 0, 2, 0) != first


async def test_a_lost_reply_to_an_acquisition_gives_the_same_fence(redis_buffer: Both, run_name: str):
    _, server = redis_buffer
    run = RunInRedis(server, run_name)
    arguments = ("learner", "request", 60_000, 0, "", "max_age", 2)
    is_ours, fence = await run.run_script("acquire", *arguments)
    assert is_ours
    assert await run.run_script("acquire", *arguments) == [1, fence]


async def test_the_audit_finds_what_does_not_belong(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    await started(buffer)
    lost, kept = await committed(buffer, 2)
    assert (await buffer.audit()).is_clean
    redis = cast("Any", server.commands)
    await redis.hdel(keys.key(run_name, "payloads"), lost)
    await redis.hset(keys.key(run_name, "payloads"), "stray", b"xyz")
    await redis.hincrby(keys.key(run_name, "state"), "issued", 1)
    problems = "\n".join((await buffer.audit()).problems)
    assert f"without their payload, for example {lost}" in problems
    assert "without a group, for example stray" in problems
    assert "3 tickets were issued, but 2 are accounted for" in problems
    assert kept not in problems


async def test_ended_tickets_leave_nothing_behind_but_counts(redis_buffer: Both, run_name: str):
    buffer, server = redis_buffer
    fence = await started(buffer)
    redis = cast("Any", server.commands)
    for step in range(1, 4):
        await committed(buffer, 2)
        await buffer.take(fence, step=step, version=0, num_groups=2, wait_s=0)
        await buffer.release(fence, step)
        await buffer.checkpoint(fence, step)
    left = {key.decode().rpartition(":")[2] for key in await redis.keys(f"{{{run_name}}}:*")}
    assert left == {"state", "learner", "versions", "ended", "requests", "tally"}


async def test_a_full_server_makes_workers_wait_and_the_learner_frees_it(run_name: str, caplog: pytest.LogCaptureFixture):
    big = 1 << 20
    with private_server(find_binary(), max_memory_mb=10) as url:
        server = Server(url, patience_s=30)
        buffer = RedisBuffer(server, run_name)
        fence = await started(buffer, groups_per_step=64)
        tickets = await buffer.reserve("w", version=0, count=64, wait_s=0)

        async def commit_all() -> None:
            for ticket in tickets[:24]:
                await buffer.commit("w", _padded(group(ticket), big))

        async with asyncio.TaskGroup() as tasks:
            committing = tasks.create_task(commit_all())
            step = 0
            while not committing.done():
                if await buffer.take(fence, step=step + 1, version=0, num_groups=2, wait_s=0.2):
                    step += 1
                    assert await buffer.renew("w", [tickets[-1].id]) == set()
                    await buffer.release(fence, step)
                    await buffer.checkpoint(fence, step)
        while await buffer.take(fence, step=step + 1, version=0, num_groups=2, wait_s=0):
            await buffer.checkpoint(fence, step := step + 1)
        audit = await buffer.audit()
        assert audit.is_clean, audit.problems
        assert audit.stats.spent == 24
        assert "waits for a checkpoint" in caplog.text
        await server.close()


def _padded(whole: RolloutGroup, size: int) -> RolloutGroup:
    return replace(whole, worker="w" * size)


def _config(folder: Path, **redis: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r", "folder": folder},
            "redis": {"connect_timeout_s": 30, **redis},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "even_digits"}],
            "leases": {"learner_s": 2 + LEARNER_LEASE_S},
        }
    )


async def test_a_killed_server_comes_back_with_everything_it_acknowledged(tmp_path: Path):
    """Workers and learner survive kill -9 of the server with a delay."""
    config = _config(tmp_path)
    steps, trained, stored = 30, [], set()
    async with EmbeddedServer(config) as embedded, open_buffer(config) as buffer, open_buffer(config) as mine:
        fence = await started(buffer, groups_per_step=4)

        async def work(name: str) -> None:
            while True:
                version = (await mine.stats()).version
                for ticket in await mine.reserve(name, version=version, count=2, wait_s=0.5):
                    if await mine.commit(name, group(ticket)) in ("stored", "already"):
                        stored.add(ticket.id)

        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(work(f"w{number}")) for number in range(3)]
            for step in range(1, steps + 1):
                if step % 10 == 5:
                    killed = embedded.pid
                    os.kill(killed, signal.SIGKILL)
                batch = await buffer.take(fence, step=step, version=step - 1, num_groups=4, wait_s=60)
                assert len(batch) == 4
                trained += [entry.group.id for entry in batch]
                await publish(buffer, fence)
                await buffer.release(fence, step)
                await buffer.checkpoint(fence, step)
            for worker in workers:
                worker.cancel()
        assert embedded.pid != killed
        assert len(trained) == len(set(trained)) == 4 * steps
        assert set(trained) <= stored
        audit = await buffer.audit()
        assert audit.is_clean, audit.problems
        assert not audit.stats.dropped


async def test_an_embedded_server_keeps_its_data_sweeps_leftovers_and_locks_its_folder(tmp_path: Path):
    config = _config(tmp_path)
    async with EmbeddedServer(config), open_buffer(config) as buffer, open_board(config) as board:
        await started(buffer)
        [kept] = await committed(buffer, 1)
        assert (await board.live_version()) is not None
        leftover = config.redis_folder / "appendonlydir" / "temp-rewriteaof-bg-1.aof"
        leftover.parent.mkdir(exist_ok=True)
        leftover.touch()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} serves"):
            async with EmbeddedServer(config):
                pass
    async with EmbeddedServer(config), open_buffer(config) as buffer:
        assert not leftover.exists()
        assert (await buffer.stats()).ready == 1
        assert (await buffer.audit()).is_clean
        assert await buffer.commit("w", group(kept)) == "already"


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of other tests remove what is abandoned in the system's."""
    with private_folder() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.mark.usefixtures("own_temporary_folder")
async def test_folders_of_sockets_that_killed_servers_left_go_when_the_next_one_starts(tmp_path: Path):
    first, second = _config(tmp_path / "first"), _config(tmp_path / "second")
    sockets = [Path(config.redis_url.removeprefix("unix://")) for config in (first, second)]
    script = """
import asyncio, sys
from pathlib import Path
from buffer.server.embedded.socket_folder import socket_folder
with socket_folder(Path(sys.argv[1])):
    Path(sys.argv[1], "redis.sock").touch()
    print("made", flush=True)
    sys.stdin.read()
"""
    pipe = asyncio.subprocess.PIPE
    first_process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", script, str(sockets[0].parent)), stdin=pipe, stdout=pipe
    )
    assert first_process.stdout is not None
    assert await first_process.stdout.readline() == b"made\n"
    async with EmbeddedServer(second):
        assert sockets[0].exists(), "its server lives"
        assert sockets[1].parent.stat().st_mode & 0o777 == 0o700
    assert not sockets[1].parent.exists()
    first_process.kill()
    await first_process.communicate()
    assert sockets[0].exists()
    async with EmbeddedServer(second):
        assert not sockets[0].parent.exists()


async def test_no_server_is_one_sentence_without_the_password(tmp_path: Path):
    config = _config(tmp_path, url="redis+sentinel://:secret@127.0.0.1:1/main", connect_timeout_s=0.2)
    with pytest.raises(BufferUnreachable, match=r"127\.0\.0\.1:1/main") as found:
        async with open_buffer(config):
            pass
    assert "secret" not in str(found.value)
    with pytest.raises(ConfigError, match=r"redis\.url") as refusal:
        EmbeddedServer(config)
    assert "secret" not in str(refusal.value)
