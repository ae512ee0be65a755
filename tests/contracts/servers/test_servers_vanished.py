"""A server that has vanished from the network: the kernel gives up a connection that only listens."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any, cast

import pytest
from redis.exceptions import RedisError

from buffer.server.client import Server, next_message, subscribe
from tests.support.waiting import PATIENCE_S, eventually


def give_up(subscription: Any) -> None:
    """End a connection as the kernel does after unanswered keepalives, without waiting for them."""
    transport = subscription.connection._writer.transport
    transport._fatal_error(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))


async def is_heard(server: Server, channel: str) -> bool:
    """Publish a message: whether somebody has got it."""
    return bool(await cast("Any", server.commands).publish(channel, "back"))


async def test_a_listener_connects_again_instead_of_spinning(redis_server: str, run_name: str) -> None:
    server = Server(redis_server, patience_s=30)
    subscription = await subscribe(server, run_name)
    try:
        waiting = asyncio.ensure_future(next_message(subscription))
        await asyncio.sleep(0)
        give_up(subscription)
        with pytest.raises(RedisError, match="the connection was given up"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        waiting = asyncio.ensure_future(next_message(subscription))
        await eventually(lambda: is_heard(server, run_name), "the subscription is renewed")
        assert (await asyncio.wait_for(waiting, PATIENCE_S))["data"] == b"back"
    finally:
        await subscription.aclose()
        await server.close()
