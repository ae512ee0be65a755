"""Makes connection pools from an address and credentials; behind Sentinels or in a Cluster they find the right server."""

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
"""A peer that vanished is noticed within 25 s, also on a connection that only listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """User and password for the server, and the files for TLS."""

    user: str | None = None
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


ANONYMOUS: Final = Credentials()


class Pools:
    """A process's connections to the Redis of its run: one pool for commands, one for waits."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._route = _make_route(address, credentials)
        options = (
            _endpoint_options(address, self._route) | _tls_options(address, credentials) | _login_options(address, credentials)
        )
        self.commands = _make_client(BlockingConnectionPool, options | {"max_connections": MAX_CONNECTIONS, "timeout": None})
        self.waits = _make_client(ConnectionPool, options)

    @property
    def may_move(self) -> bool:
        """Whether the server is discovered (Sentinel, Cluster), so that it may change."""
        return self._route is not None

    async def forget_route(self, error: Exception) -> None:
        """Drop idle connections and the discovered address: the next commands connect anew."""
        if self._route is not None:
            self._route.forget(error)
        for client in (self.commands, self.waits):
            with contextlib.suppress(RedisError, OSError):  # the connection was broken already
                await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for client in (self.commands, self.waits):
            await client.aclose()
            await client.connection_pool.disconnect()


def _make_client(pool: type[ConnectionPool], options: dict[str, Any]) -> Redis:
    return Redis(connection_pool=cast("Any", pool)(**_EVERY_CONNECTION, **options))


_EVERY_CONNECTION: Final = {
    "retry": Retry(NoBackoff(), 0),  # `Server.ask` repeats; a second retry would multiply the delays
    "socket_timeout": None,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
}


def _endpoint_options(address: Address, route: Route | None) -> dict[str, Any]:
    if address.kind == "socket":
        return {"connection_class": UnixDomainSocketConnection, "path": address.path, "db": address.db}
    keepalive = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
    tcp = {"socket_keepalive": True, "socket_keepalive_options": keepalive, "db": address.db}
    if route is not None:
        return tcp | {"connection_class": RoutedTLSConnection if address.tls else RoutedConnection, "route": route}
    [node] = address.nodes
    return tcp | _node_options(node, tls=address.tls)


def _node_options(node: Node, *, tls: bool) -> dict[str, Any]:
    return {"connection_class": SSLConnection if tls else Connection, "host": node.host, "port": node.port}


def _tls_options(address: Address, credentials: Credentials) -> dict[str, Any]:
    given = {"ca_certs": credentials.ca_file, "certfile": credentials.cert_file, "keyfile": credentials.key_file}
    if not address.tls:
        return {}
    for path in filter(None, given.values()):
        if not path.exists():
            raise ConfigError(f"redis: {path}, configured as a file for TLS, does not exist")
    return {f"ssl_{name}": str(path) for name, path in given.items() if path is not None}


def _login_options(address: Address, credentials: Credentials) -> dict[str, Any]:
    """Return the login of the server. Behind Sentinels, the URL's credentials are those of the Sentinels."""
    user, password = (address.user, address.password) if address.kind != "sentinel" else (None, None)
    return {
        "username": credentials.user if credentials.user is not None else user,
        "password": credentials.password if credentials.password is not None else password,
    }


def _make_route(address: Address, credentials: Credentials) -> Route | None:
    if address.kind == "sentinel":
        login = {"username": address.user, "password": address.password}
        return SentinelRoute(address.nodes, address.master, _make_opener(address, credentials, login))
    if address.kind == "cluster":
        return ClusterRoute(address.nodes, _make_opener(address, credentials, _login_options(address, credentials)))
    return None


def _make_opener(address: Address, credentials: Credentials, login: dict[str, Any]) -> Open:
    def open_client(node: Node) -> Redis:
        options = _node_options(node, tls=address.tls) | _tls_options(address, credentials) | login
        return _make_client(ConnectionPool, options)

    return open_client
