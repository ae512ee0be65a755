"""The changes of tickets as they happen: the scripts publish them on a channel, which keeps nothing for a late listener."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import RedisError

from buffer.run_in_redis import RunInRedis
from buffer.server.client import Server, next_message, subscribe


@asynccontextmanager
async def ticket_events(run: RunInRedis) -> AsyncGenerator[AsyncIterator[tuple[str, str]]]:
    """Subscribe to the events from here on: pairs of event and ticket, without end."""
    subscription = await subscribe(run.server, run.key("on:events"))
    try:
        yield _receive(run.server, subscription)
    finally:
        await subscription.aclose()


async def _receive(server: Server, subscription: Any) -> AsyncIterator[tuple[str, str]]:
    while True:
        try:
            message = await next_message(subscription)
        except (RedisError, OSError):
            await server.ping()  # blocks until the server is back; redis-py then renews the subscription
            continue
        event, _, ticket = message["data"].decode(errors="replace").partition(" ")
        yield event, ticket
