"""The one place that opens connections to Redis.

Callers notice a server that restarts, hangs, is full or fails over only by the delay: `Server.ask` repeats a command until it
is answered or `patience_s` is over. All commands and scripts of this package may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError

from async_rl.config import Config
from async_rl.config.buffer import RedisConfig
from async_rl.errors import BufferUnreachable, ConfigError
from buffer.server.addresses import Address, parse_address
from buffer.server.connections import ANONYMOUS, Credentials, Pools
from buffer.server.transient_errors import NO_ANSWER, TransientError, is_forbidden, is_refused, is_untrusted, transient_error

PASSWORD_VARIABLE = "ASYNC_RL_REDIS_PASSWORD"
REPLY_TIMEOUT_S = 10.0
"""After this long a command is repeated on a fresh connection. redis-py's socket_timeout is not used for this: it relies on
asyncio.wait_for, which before Python 3.12 can swallow a cancellation."""

LONGEST_PAUSE_S = 0.5
"""Longest pause between two attempts."""
EXPLAIN_AFTER_S = 2.0
"""A wait for the server that lasts longer is logged."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """The Redis of a run: one server, or the current master of a Sentinel setup, or the node of a Cluster that owns the run."""

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials = ANONYMOUS,
        patience_s: float = 60.0,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        address = parse_address(url)
        self.url = address.shown
        self._patience_s = patience_s
        self._reply_timeout_s = reply_timeout_s
        self._pools = Pools(address, credentials)
        # A wait occupies its connection, so waits have a pool of their own and never delay a command.
        self.commands: Redis = self._pools.commands
        self.waits: Redis = self._pools.waits
        self._logged: TransientError | None = None

    async def ask(self, command: Callable[[], Awaitable[T]], *, longer_s: float = 0.0) -> T:
        """Return the command's reply, repeating it over transient errors. Raises BufferUnreachable after `patience_s`.

        `longer_s` is how long the server itself may block before it replies.
        """
        transient = NO_ANSWER
        try:
            async with asyncio.timeout(self._patience_s + longer_s):
                for pause_s in _pauses():
                    try:
                        async with asyncio.timeout(self._reply_timeout_s + longer_s):
                            answer = await command()
                        self._logged = None
                        return answer
                    except (RedisError, OSError, TimeoutError) as error:
                        transient = self._transient_or_raise(error)
                        if transient.may_have_moved:
                            await self._pools.forget_route(error)
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            raise BufferUnreachable(self._timeout_message(transient)) from error
        raise AssertionError("pauses do not end")

    def _transient_or_raise(self, error: Exception) -> TransientError:
        """Return the transient error that `error` stands for; raise anything else, with a way out where there is one."""
        if is_refused(error):
            raise BufferUnreachable(
                f"the Redis at {self.url} refuses our password; check redis.user, redis.password_file or {PASSWORD_VARIABLE}"
            ) from error
        if is_forbidden(error):
            raise ConfigError(
                f"the Redis at {self.url} does not let its user do this; give each role the redis.user and password that "
                "`async-rl buffer users create` made for it"
            ) from error
        if is_untrusted(error):
            raise BufferUnreachable(
                f"the certificate of the Redis at {self.url} is not signed by redis.ca_file, or is made for another host"
            ) from error
        transient = transient_error(error)
        if transient is None and isinstance(error, RedisConnectionError):
            raise BufferUnreachable(
                f"the connection to the Redis at {self.url} cannot be used ({type(error).__name__})"
            ) from error
        if transient is None:
            raise error
        if isinstance(error, MovedError):
            if not self._pools.may_move:
                raise BufferUnreachable(f"the Redis at {self.url} {transient.what}; {transient.way_out}") from error
            return transient  # a Cluster redirects: nothing to log
        if transient is not NO_ANSWER and transient is not self._logged:
            log.warning("waits, because the Redis at %s %s", self.url, transient.what)
            self._logged = transient
        return transient

    def _timeout_message(self, transient: TransientError) -> str:
        if transient is NO_ANSWER:
            # A server that wants our certificate hangs up without a reply.
            certificate = (
                " Is that its port for TLS, and does it want redis.cert_file?" if self.url.startswith("rediss") else ""
            )
            return f"no Redis has answered at {self.url} for {self._patience_s:g} s; {transient.way_out}{certificate}"
        return f"after {self._patience_s:g} s, the Redis at {self.url} still {transient.what}; {transient.way_out}"

    async def ping(self) -> None:
        await self.ask(cast("Any", self.commands).ping)

    async def close(self) -> None:
        await self._pools.close()


def _pauses() -> Generator[float]:
    """Yield growing pauses with jitter, so that clients that lost the same server do not return at once."""
    longest = 0.01
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, LONGEST_PAUSE_S)


@asynccontextmanager
async def open_server(config: Config | RedisConfig) -> AsyncGenerator[Server]:
    """Connect to the Redis of a run, or of this section. Raises BufferUnreachable."""
    redis, url = (config, config.url) if isinstance(config, RedisConfig) else (config.redis, config.redis_url)
    server = Server(url, credentials=read_credentials(redis, os.environ), patience_s=redis.connect_timeout_s)
    hint = "" if redis.url else "; `async-rl run` or `async-rl buffer serve` starts it"
    explain = asyncio.get_running_loop().call_later(EXPLAIN_AFTER_S, log.warning, "waits for Redis at %s%s", server.url, hint)
    try:
        await server.ping()
        explain.cancel()
        yield server
    finally:
        explain.cancel()
        await server.close()


def read_credentials(redis: RedisConfig, environ: Mapping[str, str]) -> Credentials:
    """Read the credentials. Raises ConfigError if the run's data or the password would cross a network in the clear."""
    if not redis.url:
        return ANONYMOUS  # the run's own server: only this user may enter its socket's folder
    password = _read_password(redis.password_file) if redis.password_file is not None else environ.get(PASSWORD_VARIABLE)
    address = parse_address(redis.url)
    if not redis.insecure:
        _refuse_exposure(address, proves_itself=bool(password or address.password or redis.cert_file))
    return Credentials(
        user=redis.user if redis.user else None,
        password=password,
        ca_file=redis.ca_file,
        cert_file=redis.cert_file,
        key_file=redis.key_file,
    )


def _refuse_exposure(address: Address, *, proves_itself: bool) -> None:
    missing = [what for what, is_there in (("TLS", address.tls), ("a password", proves_itself)) if not is_there]
    if address.remote_hosts and missing:
        raise ConfigError(
            f"redis.url: {address.shown} is reached over the network without {' and without '.join(missing)}; use rediss:// "
            f"and redis.password_file (or {PASSWORD_VARIABLE}), or set redis.insecure: true if that network is private"
        )


def _read_password(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis.password_file: cannot read {path}: {error.strerror}") from error


@asynccontextmanager
async def listen(server: Server, channel: str) -> AsyncGenerator[Callable[[float], Awaitable[None]]]:
    """Subscribe to a channel and yield `wait(timeout_s)`, which returns at the next notification or at its timeout.

    Notifications after entry are seen. A lost one only costs time: callers check again at intervals anyway.
    """
    subscription = await subscribe(server, channel)

    async def wait(timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                try:
                    await next_message(subscription)
                except (RedisError, OSError):  # redis-py connects again
                    await asyncio.sleep(LONGEST_PAUSE_S)

    try:
        yield wait
    finally:
        await subscription.aclose()


async def next_message(subscription: Any, *, kind: str = "message") -> Any:
    """Wait for the next message of this kind. Raises RedisError or OSError when the connection is lost; the next call connects
    again and renews the subscription."""
    while (message := await subscription.get_message(timeout=None)) is not None:
        if message["type"] == kind:
            return message
    # redis-py takes the kernel's ETIMEDOUT (the peer has vanished) for a time limit of its own, and from then on returns None
    # at once, again and again.
    await subscription.connection.disconnect(nowait=True)
    raise RedisConnectionError("the server has not answered for so long that the connection was given up")


async def subscribe(server: Server, channel: str) -> Any:
    """Return a subscription that the server has confirmed; the caller closes it."""

    async def on_a_new_connection() -> Any:  # redis-py would keep a dead one that was never closed
        subscription = cast("Any", server.waits).pubsub()
        try:
            await subscription.subscribe(channel)
            await next_message(subscription, kind="subscribe")
        except BaseException:
            await subscription.aclose()
            raise
        return subscription

    return await server.ask(on_a_new_connection)
