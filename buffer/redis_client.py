"""The one place that opens connections to Redis.

A server that restarts, or hangs for a while, is invisible to callers except for the delay: redis-py repeats the command
(all of ours may be repeated) until it is answered or `patience_s` is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from async_rl.config import Config
from async_rl.errors import BufferUnreachable, ConfigError

MAX_CONNECTIONS = 32
REPLY_TIMEOUT_S = 10.0
"""A server that takes longer for a command hangs; the command is repeated on a fresh connection. This is not left to
redis-py's socket_timeout: that uses asyncio.wait_for, which before Python 3.12 can swallow a cancellation."""

SILENCE_S = 2.0
"""A wait for the server that lasts longer is explained."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """A Redis server as a process of ours sees it."""

    def __init__(self, url: str, *, password: str | None = None, patience_s: float = 60.0) -> None:
        self.url = _without_password(url)
        self._patience_s = patience_s
        # Waiting occupies a connection, so that has a pool of its own: waits never keep a command from being sent.
        self.commands: Redis = _client(BlockingConnectionPool, url, password, max_connections=MAX_CONNECTIONS, timeout=None)
        self.waits: Redis = _client(ConnectionPool, url, password)

    async def ask(self, command: Callable[[], Awaitable[T]], *, longer_s: float = 0.0) -> T:
        """The command's answer. `longer_s` is how long the server itself may wait before it answers."""
        try:
            async with asyncio.timeout(self._patience_s + longer_s):
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(REPLY_TIMEOUT_S + longer_s):
                            return await command()
        except TimeoutError as error:
            waited = f"no Redis has answered at {self.url} for {self._patience_s:g} s"
            raise BufferUnreachable(f"{waited}; is the server running, and is the address right?") from error
        except AuthenticationError as error:
            raise BufferUnreachable(f"the Redis at {self.url} refuses our password; check redis.password_file") from error
        except RedisConnectionError as error:
            raise BufferUnreachable(
                f"the connection to the Redis at {self.url} cannot be used ({type(error).__name__})"
            ) from error

    async def ping(self) -> None:
        await self.ask(cast("Any", self.commands).ping)

    async def close(self) -> None:
        for client in (self.commands, self.waits):
            await client.aclose()
            await client.connection_pool.disconnect()


@asynccontextmanager
async def open_server(config: Config) -> AsyncGenerator[Server]:
    """Connected, or BufferUnreachable."""
    server = Server(config.redis_url, password=_password(config), patience_s=config.redis.connect_timeout_s)
    hint = "" if config.redis.url else "; `async-rl run` or `async-rl buffer serve` starts it"
    explain = asyncio.get_running_loop().call_later(SILENCE_S, log.warning, "waits for Redis at %s%s", server.url, hint)
    try:
        await server.ping()
        explain.cancel()
        yield server
    finally:
        explain.cancel()
        await server.close()


class Bell:
    """Hears a channel. Nothing depends on it but speed: who listens looks again from time to time anyway."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    async def ring(self, timeout_s: float) -> None:
        """Returns when the channel rang, or after `timeout_s`; a broken connection is restored on the way."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self._subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s) is None:
                    pass
        except (TimeoutError, RedisError):
            pass


@asynccontextmanager
async def listen(server: Server, channel: str) -> AsyncGenerator[Bell]:
    """From here on, no ring is missed."""
    subscription = server.waits.pubsub()  # pyright: ignore[reportUnknownMemberType]
    try:
        await server.ask(lambda: _subscribed(subscription, channel))
        yield Bell(subscription)
    finally:
        await subscription.aclose()


async def _subscribed(subscription: Any, channel: str) -> None:
    await subscription.subscribe(channel)
    while await subscription.get_message(timeout=None) is None:
        pass


class _Patient(Retry):
    """Repeats a command for ever (its caller holds the deadline), except when the server refuses us for good."""

    def __init__(self) -> None:
        super().__init__(EqualJitterBackoff(cap=0.5, base=0.01), retries=-1)

    async def call_with_retry(self, do: Callable[[], Awaitable[T]], fail: Any, *args: Any, **options: Any) -> T:
        options.setdefault("is_retryable", _may_pass)
        return await super().call_with_retry(do, fail, *args, **options)


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, AuthenticationError)


_EVERY_CONNECTION = {
    "retry": _Patient(),
    "socket_timeout": None,
    "socket_connect_timeout": REPLY_TIMEOUT_S,
}


def _client(pool: type[ConnectionPool], url: str, password: str | None, **options: Any) -> Redis:
    if password is not None:
        options["password"] = password
    if not url.startswith("unix"):
        options["socket_keepalive"] = True
    try:
        return Redis(connection_pool=cast("Any", pool).from_url(url, **_EVERY_CONNECTION, **options))
    except ValueError as error:
        raise ConfigError(f"redis.url: {_without_password(url)!r} is no address of a Redis server ({error})") from error


def _password(config: Config) -> str | None:
    path = config.redis.password_file
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis.password_file: cannot read {path}: {error.strerror}") from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl() if parts.netloc else url.partition("?")[0]
