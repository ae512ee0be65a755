"""Finds the server to connect to where it can change: the Sentinels' master, or the node of a Cluster that owns the run.

All keys of a run share one hash tag, so one node serves them all and an ordinary connection to it is enough. The node is
searched for when a connection is made, and again after it was lost or redirected a command.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from redis.asyncio import Connection, Redis, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError

from buffer.server.addresses import Node

ASK_TIMEOUT_S = 2.0
"""Timeout of one Sentinel or node; then the next one is asked."""

Open = Callable[[Node], Redis]
"""Opens a client of one Sentinel or node."""


class Route(Protocol):
    """Finds the server for every connection of a process, so that all of them use the same one."""

    async def find(self) -> Node:
        """Return the current server. Raises RedisConnectionError if no Sentinel or node knows it."""
        ...

    def forget(self, error: Exception) -> None:
        """Forget the server found last, which is not the right one any more; `error` may name the next."""
        ...


class SentinelRoute:
    """Finds the master of a name."""

    def __init__(self, sentinels: tuple[Node, ...], master: str, open_client: Open) -> None:
        self._sentinels = list(sentinels)
        self._master = master
        self._open = open_client

    async def find(self) -> Node:
        unknown = False
        for sentinel in list(self._sentinels):
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                said = await _ask(self._open, sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
                if said is not None:
                    self._sentinels.remove(sentinel)
                    self._sentinels.insert(0, sentinel)  # the next search begins with it
                    return Node(said[0].decode(), int(said[1]))
                unknown = True
        complaint = f"no Sentinel knows a master {self._master!r}" if unknown else "no Sentinel answers"
        raise RedisConnectionError(complaint)

    def forget(self, error: Exception) -> None:
        """Do nothing: the Sentinels are asked for every new connection."""


class ClusterRoute:
    """Finds the node that owns the run's slot.

    The Cluster names the slot: a node that does not own it replies MOVED to the first command.
    """

    def __init__(self, seeds: tuple[Node, ...], open_client: Open) -> None:
        self._nodes = list(seeds)
        self._open = open_client
        self._slot: int | None = None
        self._owner: Node | None = None

    async def find(self) -> Node:
        if self._owner is None:
            self._owner = await self._search()
        return self._owner

    def forget(self, error: Exception) -> None:
        self._owner = None
        if isinstance(error, MovedError):
            self._slot = error.slot_id
            host, port = cast("Any", error).node_addr
            if host:  # a node that announces no address has none
                self._owner = Node(host, port)

    async def _search(self) -> Node:
        for node in list(self._nodes):
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                ranges = _parse_ranges(await _ask(self._open, node, "CLUSTER", "SLOTS"), node)
                # A failover may promote a node that the configuration does not list.
                self._nodes += sorted({place for _, _, *places in ranges for place in places}.difference(self._nodes))
                owners = [
                    places[0] for first, last, *places in ranges if self._slot is not None and first <= self._slot <= last
                ]
                return owners[0] if owners else node
            self._nodes.append(self._nodes.pop(self._nodes.index(node)))  # the next search begins with other nodes
        raise RedisConnectionError("no node of the Cluster answers")


def _parse_ranges(reply: list[list[Any]], asked: Node) -> list[tuple[Any, ...]]:
    """Parse CLUSTER SLOTS: first and last slot, then the nodes, owner first. A node without an address is the one asked."""
    return [
        (first, last, *(Node(place[0].decode() if place[0] else asked.host, place[1]) for place in places))
        for first, last, *places in reply
    ]


async def _ask(open_client: Open, node: Node, *command: str) -> Any:
    client = open_client(node)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await cast("Any", client).execute_command(*command)
    finally:
        await client.aclose(close_connection_pool=True)


class _Routed:
    """A connection that asks `route` for the server whenever it connects. `route` is one of the pool's options."""

    host: str
    port: int

    def __init__(self, *, route: Route, **options: Any) -> None:
        self._route = route
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self._route.find()
        try:
            await super()._connect()  # pyright: ignore
        except (OSError, TimeoutError) as error:
            self._route.forget(error)
            raise


class RoutedConnection(_Routed, Connection):
    pass


class RoutedTLSConnection(_Routed, SSLConnection):
    pass
