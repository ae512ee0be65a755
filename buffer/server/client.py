"""The one place that opens connections to Redis.

A server that restarts, hangs, is full or fails over is invisible to callers except for the delay: the command (all of ours may
be repeated) is repeated until it is answered or `patience_s` is over.
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
from async_rl.errors import BufferUnreachable, ConfigError
from buffer.server.addresses import Address, parse
from buffer.server.connections import ANONYMOUS, Credentials, Pools
from buffer.server.transient_errors import NO_ANSWER, TransientError, is_forbidden, is_refused, is_untrusted, transient_error

PASSWORD_VARIABLE = "ASYNC_RL_REDIS_PASSWORD"
REPLY_TIMEOUT_S = 10.0
"""A server that takes longer for a command hangs; the command is repeated on a fresh connection. This is not left to
redis-py's socket_timeout: that uses asyncio.wait_for, which before Python 3.12 can swallow a cancellation."""

LONGEST_PAUSE_S = 0.5
"""Between two attempts."""
EXPLAIN_AFTER_S = 2.0
"""A wait for the server that lasts longer is explained."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """A Redis as a process of ours sees it: one server, or the member of a Sentinel or Cluster setup that counts now."""

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials = ANONYMOUS,
        patience_s: float = 60.0,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        address = parse(url)
        self.url = address.shown
        self._patience_s = patience_s
        self._reply_timeout_s = reply_timeout_s
        self._pools = Pools(address, credentials)
        # Waiting occupies a connection, so that has a pool of its own: waits never keep a command from being sent.
        self.commands: Redis = self._pools.commands
        self.waits: Redis = self._pools.waits
        self._told: TransientError | None = None

    async def ask(self, command: Callable[[], Awaitable[T]], *, longer_s: float = 0.0) -> T:
        """The command's answer. `longer_s` is how long the server itself may wait before it answers."""
        trouble = NO_ANSWER
        try:
            async with asyncio.timeout(self._patience_s + longer_s):
                for pause_s in _pauses():
                    try:
                        async with asyncio.timeout(self._reply_timeout_s + longer_s):
                            answer = await command()
                        self._told = None
                        return answer
                    except (RedisError, OSError, TimeoutError) as error:
                        trouble = self._judged(error)
                        if trouble.may_have_moved:
                            await self._pools.forget_route(error)
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            raise BufferUnreachable(self._gave_up(trouble)) from error
        raise AssertionError("pauses do not end")

    def _judged(self, error: Exception) -> TransientError:
        """What may pass; everything else is raised, as a sentence where a person can do something about it."""
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
        trouble = transient_error(error)
        if trouble is None and isinstance(error, RedisConnectionError):
            raise BufferUnreachable(
                f"the connection to the Redis at {self.url} cannot be used ({type(error).__name__})"
            ) from error
        if trouble is None:
            raise error
        if isinstance(error, MovedError):
            if not self._pools.may_move:
                raise BufferUnreachable(f"the Redis at {self.url} {trouble.what}; {trouble.way_out}") from error
            return trouble  # a Cluster says where to go: nobody need hear of it
        if trouble is not NO_ANSWER and trouble is not self._told:
            log.warning("waits, because the Redis at %s %s", self.url, trouble.what)
            self._told = trouble
        return trouble

    def _gave_up(self, trouble: TransientError) -> str:
        if trouble is NO_ANSWER:
            # A server that misses our certificate just hangs up.
            certificate = (
                " Is that its port for TLS, and does it want redis.cert_file?" if self.url.startswith("rediss") else ""
            )
            return f"no Redis has answered at {self.url} for {self._patience_s:g} s; {trouble.way_out}{certificate}"
        return f"after {self._patience_s:g} s, the Redis at {self.url} still {trouble.what}; {trouble.way_out}"

    async def ping(self) -> None:
        await self.ask(cast("Any", self.commands).ping)

    async def close(self) -> None:
        await self._pools.close()


def _pauses() -> Generator[float]:
    """Growing, and never the same for two clients that lost the same server."""
    longest = 0.01
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, LONGEST_PAUSE_S)


@asynccontextmanager
async def open_server(config: Config) -> AsyncGenerator[Server]:
    """Connected, or BufferUnreachable."""
    server = Server(
        config.redis_url, credentials=credentials_for(config, os.environ), patience_s=config.redis.connect_timeout_s
    )
    hint = "" if config.redis.url else "; `async-rl run` or `async-rl buffer serve` starts it"
    explain = asyncio.get_running_loop().call_later(EXPLAIN_AFTER_S, log.warning, "waits for Redis at %s%s", server.url, hint)
    try:
        await server.ping()
        explain.cancel()
        yield server
    finally:
        explain.cancel()
        await server.close()


def credentials_for(config: Config, environ: Mapping[str, str]) -> Credentials:
    """Raises ConfigError where the run's data or the password would cross a network in the clear."""
    redis = config.redis
    if not redis.url:
        return ANONYMOUS  # our own server: its socket's folder lets nobody else in
    password = _read(redis.password_file) if redis.password_file is not None else environ.get(PASSWORD_VARIABLE)
    address = parse(redis.url)
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
    if address.foreign_hosts and missing:
        raise ConfigError(
            f"redis.url: {address.shown} is reached over the network without {' and without '.join(missing)}; use rediss:// "
            f"and redis.password_file (or {PASSWORD_VARIABLE}), or set redis.insecure: true if nobody else is on that network"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis.password_file: cannot read {path}: {error.strerror}") from error


class ChannelListener:
    """Hears a channel. Nothing depends on it but speed: who listens looks again from time to time anyway."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    async def wait(self, timeout_s: float) -> None:
        """Returns when the channel rang, or after `timeout_s`; a broken connection is restored on the way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                try:
                    while await self._subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s) is None:
                        pass
                except (RedisError, OSError):
                    # What rang meanwhile was missed, so the caller looks again; but not as fast as it can.
                    await asyncio.sleep(LONGEST_PAUSE_S)


@asynccontextmanager
async def listen(server: Server, channel: str) -> AsyncGenerator[ChannelListener]:
    """From here on, no ring is missed."""
    subscription = await server.ask(lambda: _subscribed(server, channel))
    try:
        yield ChannelListener(subscription)
    finally:
        await subscription.aclose()


async def _subscribed(server: Server, channel: str) -> Any:
    """Each attempt on a connection of its own: redis-py would keep one that is dead without being closed."""
    subscription = cast("Any", server.waits).pubsub()
    try:
        await subscription.subscribe(channel)
        while await subscription.get_message(timeout=None) is None:
            pass
    except BaseException:
        await subscription.aclose()
        raise
    return subscription
