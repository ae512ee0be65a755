"""Which server to connect to, when that can change: the Sentinels' master, or the node of a Cluster that owns the run.

All keys of a run share one hash tag, so one node at a time serves them all, and an ordinary connection to it is enough. What is
left to do is to ask around for the node, and to ask again whenever it was lost or sent us elsewhere.
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
"""For one Sentinel or node to say where the master is; the next one is asked then."""

Open = Callable[[Node], Redis]
"""A client of one Sentinel or node."""


class Route(Protocol):
    """Used by every connection of a process, so that all of them go to the same place."""

    async def find(self) -> Node:
        """Where to connect now. Raises RedisConnectionError when nobody can tell."""
        ...

    def lost(self, error: Exception) -> None:
        """The place found last is not the right one any more."""
        ...


class SentinelRoute:
    """The master of a name."""

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
                    self._prefer(sentinel)
                    return Node(said[0].decode(), int(said[1]))
                unknown = True
        complaint = f"no Sentinel knows a master {self._master!r}" if unknown else "no Sentinel answers"
        raise RedisConnectionError(complaint)

    def lost(self, error: Exception) -> None:
        """The Sentinels are asked for every new connection anyway."""

    def _prefer(self, sentinel: Node) -> None:
        self._sentinels.remove(sentinel)
        self._sentinels.insert(0, sentinel)


class ClusterRoute:
    """The node that owns the slot of the only run a process speaks of.

    Which slot that is, the Cluster says itself: whatever node is asked first answers MOVED.
    """

    def __init__(self, seeds: tuple[Node, ...], open_client: Open) -> None:
        self._nodes = list(seeds)
        self._open = open_client
        self._slot: int | None = None
        self._owner: Node | None = None

    async def find(self) -> Node:
        if self._owner is None:
            self._owner = await self._ask_around()
        return self._owner

    def lost(self, error: Exception) -> None:
        self._owner = None
        if isinstance(error, MovedError):
            self._slot = error.slot_id
            host, port = cast("Any", error).node_addr
            if host:  # an owner whose address nobody was told has none
                self._owner = Node(host, port)

    async def _ask_around(self) -> Node:
        for node in list(self._nodes):
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                ranges = _ranges(await _ask(self._open, node, "CLUSTER", "SLOTS"), node)
                self._learn({place for _, _, *places in ranges for place in places})
                owners = [
                    places[0] for first, last, *places in ranges if self._slot is not None and first <= self._slot <= last
                ]
                return owners[0] if owners else node
            self._nodes.append(self._nodes.pop(self._nodes.index(node)))  # the next search begins with others
        raise RedisConnectionError("no node of the Cluster answers")

    def _learn(self, nodes: set[Node]) -> None:
        """A failover may promote a node that the configuration does not mention."""
        self._nodes += sorted(nodes.difference(self._nodes))


def _ranges(reply: list[list[Any]], asked: Node) -> list[tuple[Any, ...]]:
    """Of CLUSTER SLOTS: first and last slot, then its nodes, the owner first. A node without a name is the one asked."""
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
    """A connection that asks for its way whenever it is made. `route` comes with the pool's options."""

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
            self._route.lost(error)
            raise


class RoutedConnection(_Routed, Connection):
    pass


class RoutedTLSConnection(_Routed, SSLConnection):
    pass
