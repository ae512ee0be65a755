"""torch.distributed's Store over the run's Redis: the rendezvous where processes exchange addresses to form a process group.

torch's TCPStore listens on a port without a password or roles. This store is open to users of the run's Redis alone, with the
run's Cluster, Sentinel, TLS and ACL settings. Each key of the store is one key of Redis, and expires.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store  # where torch's own type stubs have it
from torch.distributed import DistStoreError

from buffer import keys
from buffer.run_in_redis import Argument, RunInRedis
from buffer.server.blocking_client import BlockingServer
from buffer.server.client import listen

EXPIRY_S = 3600
"""A key expires this long after its last write. A rendezvous reads it within its time limit, which is minutes."""
MAX_VALUE_BYTES = 2**20
"""Addresses and NCCL ids take hundreds of bytes; longer values belong on the board or the weight wire."""
RECHECK_S = 1.0
"""A wait reads the key again this often: a notification is lost when the server restarts."""

T = TypeVar("T")


class RedisGroupStores:
    def __init__(self, server: BlockingServer, run: str) -> None:
        self._server = server
        self._run = run
        # torch's groups refer to the C++ half of a store only: without its Python half, their calls would fail.
        self._opened: dict[str, RedisGroupStore] = {}

    def open(self, name: str) -> RedisGroupStore:
        return self._opened.setdefault(name, RedisGroupStore(self._server, self._run, name))


class RedisGroupStore(Store):
    """One store. Every call blocks until Redis has replied; `get` and `wait` block until the key is set.

    Calls are repeated across restarts of the server and raise DistStoreError after `timeout` (torch's `set_timeout`).
    Offers the calls that process groups make; torch refuses the others (`num_keys`, `compare_set`, `delete_key`).
    """

    def __init__(self, server: BlockingServer, run: str, name: str) -> None:
        super().__init__()
        self._server = server
        self._run = run
        self._name = name

    def set(self, key: str, value: str | bytes) -> None:
        self._change("store_set", key, _bounded(value))

    def get(self, key: str) -> bytes:
        return self._ask(f"get {key!r}", lambda run: self._arrival(run, key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        async def all_there(run: RunInRedis) -> None:
            for key in keys:
                await self._arrival(run, key)

        self._ask(f"wait for {keys}", all_there, timeout)

    def check(self, keys: list[str]) -> bool:
        names = [self._key(key) for key in keys]
        return self._ask("check", lambda run: run.run_command("exists", *names)) == len(names)

    def add(self, key: str, value: int) -> int:
        """Add once, also when the reply is lost and the call is repeated."""
        return int(self._change("store_add", key, value))

    def clone(self) -> RedisGroupStore:
        """Return this store: any number of threads may use it."""
        return self

    def _key(self, key: str) -> str:
        return keys.group_store(self._run, self._name, key)

    async def _arrival(self, run: RunInRedis, key: str) -> bytes:
        name = self._key(key)
        if (value := await run.run_command("get", name)) is not None:
            return value
        async with listen(run.server, name) as wait:
            while (value := await run.run_command("get", name)) is None:
                await wait(RECHECK_S)
        return value

    def _change(self, script: str, key: str, *arguments: Argument) -> Any:
        entry, call = self._key(key), self._key(f"call:{uuid.uuid4().hex}")
        return self._ask(
            f"change {key!r}",
            lambda run: run.run_script(script, EXPIRY_S * 1000, *arguments, entry=entry, entry_call=call),
        )

    def _ask(self, what: str, ask: Callable[[RunInRedis], Coroutine[Any, Any, T]], timeout: timedelta | None = None) -> T:
        own: timedelta = cast("Any", self).timeout  # which torch's type stubs do not know
        limit_s = (timeout if timeout is not None else own).total_seconds()
        try:
            return self._server.call(lambda server: ask(RunInRedis(server, self._run)), within_s=limit_s)
        except TimeoutError:
            raise DistStoreError(f"the store {self._name!r} could not {what} within {limit_s:g} s") from None
        except CancelledError:
            raise DistStoreError(f"the store {self._name!r} was closed before it could {what}") from None


def _bounded(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE_BYTES:
        raise ValueError(f"a store for process groups takes values of {MAX_VALUE_BYTES} bytes at most, not {len(data)}")
    return data
