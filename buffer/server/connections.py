"""From an address and credentials to pools of connections, wherever the right server may stand at the moment."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from async_rl.errors import ConfigError
from buffer.server.addresses import Address, Node
from buffer.server.discovery import ClusterRoute, Open, Route, RoutedConnection, RoutedTLSConnection, SentinelRoute

MAX_CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A peer that vanished without a word is noticed within 25 s, also by a connection that only listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who we are to the servers, and how we know that they are ours."""

    user: str | None = None
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


ANONYMOUS: Final = Credentials()


class Pools:
    """All connections of a process to the Redis of its run."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._route = _route(address, credentials)
        options = _place(address, self._route) | _security(address, credentials) | _login(address, credentials)
        self.commands = _client(BlockingConnectionPool, options | {"max_connections": MAX_CONNECTIONS, "timeout": None})
        self.waits = _client(ConnectionPool, options)

    @property
    def may_move(self) -> bool:
        """The right server is asked for, so it may be another one later."""
        return self._route is not None

    async def forget_route(self, error: Exception) -> None:
        """New connections are made for the next commands, by asking for the way again."""
        if self._route is not None:
            self._route.lost(error)
        for client in (self.commands, self.waits):
            with contextlib.suppress(RedisError, OSError):  # of a connection that was broken already
                await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for client in (self.commands, self.waits):
            await client.aclose()
            await client.connection_pool.disconnect()


def _client(pool: type[ConnectionPool], options: dict[str, Any]) -> Redis:
    return Redis(connection_pool=cast("Any", pool)(**_EVERY_CONNECTION, **options))


_EVERY_CONNECTION: Final = {
    "retry": Retry(NoBackoff(), 0),  # `Server.ask` repeats; two who repeat would multiply the delays
    "socket_timeout": None,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
}


def _place(address: Address, route: Route | None) -> dict[str, Any]:
    if address.kind == "socket":
        return {"connection_class": UnixDomainSocketConnection, "path": address.path, "db": address.db}
    keepalive = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
    tcp = {"socket_keepalive": True, "socket_keepalive_options": keepalive, "db": address.db}
    if route is not None:
        return tcp | {"connection_class": RoutedTLSConnection if address.tls else RoutedConnection, "route": route}
    [node] = address.nodes
    return tcp | _at(node, tls=address.tls)


def _at(node: Node, *, tls: bool) -> dict[str, Any]:
    return {"connection_class": SSLConnection if tls else Connection, "host": node.host, "port": node.port}


def _security(address: Address, credentials: Credentials) -> dict[str, Any]:
    given = {"ca_certs": credentials.ca_file, "certfile": credentials.cert_file, "keyfile": credentials.key_file}
    if not address.tls:
        return {}
    for path in filter(None, given.values()):
        if not path.exists():
            raise ConfigError(f"redis: there is no {path}, which is named as one of the files for TLS")
    return {f"ssl_{name}": str(path) for name, path in given.items() if path is not None}


def _login(address: Address, credentials: Credentials) -> dict[str, Any]:
    """The URL's credentials are for whoever answers there; behind Sentinels, that is not the server itself."""
    own = address.user, address.password
    user, password = own if credentials.password is None and address.kind != "sentinel" else (None, credentials.password)
    return {"username": credentials.user if credentials.user is not None else user, "password": password}


def _route(address: Address, credentials: Credentials) -> Route | None:
    if address.kind == "sentinel":
        login = {"username": address.user, "password": address.password}
        return SentinelRoute(address.nodes, address.master, _opener(address, credentials, login))
    if address.kind == "cluster":
        return ClusterRoute(address.nodes, _opener(address, credentials, _login(address, credentials)))
    return None


def _opener(address: Address, credentials: Credentials, login: dict[str, Any]) -> Open:
    def open_client(node: Node) -> Redis:
        options = _at(node, tls=address.tls) | _security(address, credentials) | login
        return _client(ConnectionPool, options)

    return open_client
