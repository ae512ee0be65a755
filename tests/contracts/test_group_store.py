"""Stores for process groups on every Redis or Valkey that is installed: torch's calls, and failures of the server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from async_rl.config import Config
from async_rl.errors import ConfigError
from buffer import keys, open_group_stores
from buffer.group_store import EXPIRY_S, MAX_VALUE_BYTES, RedisGroupStore
from buffer.server.client import Server
from buffer.server.users import create_users
from tests.support.chaos_proxy import ChaosProxy, Weather
from tests.support.private_fleet import cluster_url, private_cluster
from tests.support.private_server import (
    binaries,
    client_of,
    every_server,
    private_folder,
    private_server,
    server_on,
    servers_to_test,
)
from tests.support.waiting import PATIENCE_S
from tests.support.warm_processes import run_ranks

CLUSTER = "cluster"
BUNDLED = binaries()["bundled"]


def config(url: str, run: str, **redis: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": run},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1, "ffn": 8}},
            "redis": {"url": url, **redis},
            "environments": [{"type": "even_digits"}],
        }
    )


@pytest.fixture(scope="session", params=[*servers_to_test(), *([CLUSTER] if every_server() else [])])
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == CLUSTER:
        with private_cluster(BUNDLED) as nodes:
            yield cluster_url(nodes)
    else:
        with private_server(binaries()[request.param]) as url:
            yield url


@pytest.fixture
def store(server_url: str, run_name: str) -> Iterator[RedisGroupStore]:
    with open_group_stores(config(server_url, run_name)) as stores:
        yield stores.open("ranks")


def test_it_is_a_store_as_torch_knows_them(store: RedisGroupStore):
    store.set("text", "words")
    store.set("bytes", b"\0\xff")
    assert (store.get("text"), store.get("bytes")) == (b"words", b"\0\xff")
    assert store.check(["text", "bytes", "text"])
    assert not store.check(["text", "missing"])
    assert [store.add("count", 2), store.add("count", -5), store.add("count", 0)] == [2, -3, -3]
    assert store.get("count") == b"-3"
    store.wait(["text", "count"], timedelta(seconds=10))


def test_torch_itself_can_call_it(store: RedisGroupStore):
    """Call it through C++, as process groups do, also when only C++ refers to it."""
    prefixed = PrefixStore("group", store.clone())
    prefixed.set("key", b"\0value")
    assert prefixed.get("key") == store.get("group/key") == b"\0value"
    assert prefixed.add("count", 3) == 3
    prefixed.wait(["key", "count"])
    prefixed.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(DistStoreError, match=r"could not get 'group/missing' within 0\.1 s"):
        prefixed.get("missing")
    with pytest.raises(DistStoreError, match=r"wait for \['group/missing'\] within 0\.2 s"):
        prefixed.wait(["missing"], timedelta(seconds=0.2))


def test_stores_of_other_names_and_runs_hold_other_keys(store: RedisGroupStore, server_url: str, run_name: str):
    store.set("key", "ours")
    with open_group_stores(config(server_url, run_name)) as ours, open_group_stores(config(server_url, "other")) as theirs:
        assert ours.open("ranks").get("key") == b"ours"
        assert not ours.open("wire").check(["key"])
        assert not theirs.open("ranks").check(["key"])


def test_a_wait_ends_when_another_process_sets_the_key(store: RedisGroupStore, server_url: str, run_name: str):
    found: list[bytes] = []
    waits = [threading.Thread(target=lambda key=key: found.append(store.get(key))) for key in ("a", "b")]
    for wait in waits:
        wait.start()
    with open_group_stores(config(server_url, run_name)) as stores:
        other = stores.open("ranks")
        other.set("a", "told")
        other.add("b", 7)
        for wait in waits:
            wait.join(PATIENCE_S)
    assert sorted(found) == [b"7", b"told"]


def test_calls_of_a_store_that_is_closed_fail_at_once(server_url: str, run_name: str):
    """Also calls from threads, which torch's process groups have."""
    begun = threading.Event()
    ended: list[str] = []

    def use(store: RedisGroupStore) -> None:
        refused = 0
        while refused < 2:  # the call that waits, and the next one
            try:
                store.set("key", "value")
            except DistStoreError as error:
                refused += 1
                ended.append(str(error))
            begun.set()

    with open_group_stores(config(server_url, run_name)) as stores:
        threads = [threading.Thread(target=use, args=[stores.open("group")]) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert begun.wait(PATIENCE_S)
    for thread in threads:
        thread.join(60)
    assert len(ended) == 16
    assert all("was closed" in each for each in ended)


def test_values_are_bounded(store: RedisGroupStore):
    store.set("key", b"x" * MAX_VALUE_BYTES)
    with pytest.raises(ValueError, match="at most"):
        store.set("key", b"x" * (MAX_VALUE_BYTES + 1))


def test_all_that_is_written_expires(redis_server: str, run_name: str):
    with open_group_stores(config(redis_server, run_name)) as stores:
        store = stores.open("ranks")
        store.set("key", "value")
        store.add("count", 1)
    with client_of(unix_socket_path=redis_server.removeprefix("unix://")) as client:
        left = {name: client.pttl(name) for name in client.scan_iter(f"{keys.key(run_name, '')}*")}
    assert len(left) == 3, left
    assert all(0 < milliseconds <= EXPIRY_S * 1000 for milliseconds in left.values()), left


async def test_an_addition_whose_answer_was_lost_counts_once(redis_server: str, run_name: str):
    async with ChaosProxy(redis_server, seed=1) as proxy:
        lost: list[bytes] = []

        def loses_reply(request: bytes) -> bool:
            lost.append(request)
            return len(lost) == 1

        def add() -> list[int]:
            with open_group_stores(config(proxy.url, run_name, insecure=True)) as stores:
                store = stores.open("ranks")
                store.add("count", 0)  # the server has the script from here on
                proxy.weather = Weather(loses_reply=loses_reply)
                return [store.add("count", 1), store.add("count", 1)]

        assert await asyncio.to_thread(add) == [1, 2]
        assert proxy.resets > 0 or len(lost) > 2


def test_a_wait_survives_a_restart_of_the_server(run_name: str):
    with private_folder() as folder, ExitStack() as ending:
        with server_on(BUNDLED, folder) as (url, process):
            store = ending.enter_context(open_group_stores(config(url, run_name))).open("ranks")
            store.set("before", "kept")
            found: list[bytes] = []
            wait = threading.Thread(target=lambda: found.append(store.get("key")))
            wait.start()
            with client_of(unix_socket_path=str(folder / "redis.sock")) as client:
                while not client.pubsub_numsub(keys.group_store(run_name, "ranks", "key"))[0][1]:
                    pass
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            store.set_timeout(timedelta(seconds=0.5))
            with pytest.raises(DistStoreError, match=r"could not get 'before' within 0\.5 s"):
                store.get("before")
        with server_on(BUNDLED, folder):
            store.set_timeout(timedelta(seconds=60))
            store.set("key", "told")
            wait.join(PATIENCE_S)
            assert (found, store.get("before")) == ([b"told"], b"kept")


@pytest.mark.parametrize("role", ["worker", "learner", "monitor"])
async def test_users_of_the_run_may_use_it_unless_they_only_look(redis_server: str, run_name: str, role: str, tmp_path: Path):
    admin = Server(redis_server)
    created = await create_users(admin, run_name, folder=tmp_path / "users")
    await admin.close()

    def use() -> int:
        login = {"user": created.users[role], "password_file": str(created.password_files[role])}
        with open_group_stores(config(redis_server, run_name, **login)) as stores:
            store = stores.open("wire")
            store.set("key", "value")
            store.get("key")
            return store.add("count", 1)

    if role == "monitor":
        with pytest.raises(ConfigError, match="does not let its user do this"):
            await asyncio.to_thread(use)
    else:
        assert await asyncio.to_thread(use) == 1


def test_processes_form_groups_over_it(redis_server: str, run_name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = run_ranks("tests.contracts.group_rank", redis_server, run_name)
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, "6.0\n")] * 2, ranks
