"""Serve an aiohttp application on one address, for clients that know a token."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from async_rl.config.exposure import knows
from async_rl.errors import ConfigError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listen(application: web.Application, host: str, port: int, *, key: str = "") -> AsyncGenerator[int]:
    """Serve until the block is left; yields the port. Raises ConfigError, naming `key`, when the address cannot be used."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror if error.errno is None or error.errno < 0 else os.strerror(error.errno)  # below 0: an unknown name
        raise ConfigError(
            f"{f'{key}: ' if key else ''}cannot listen on {host}:{port}: {why}; "
            "host must be an address of this machine, and port a free one, or 0 for any"
        ) from error
    with listener:
        # handler_cancellation ends the work for a client that disconnects. What a server still does for its clients it ends
        # itself, so the shutdown waits only for responses being sent.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield listener.getsockname()[1]
        finally:
            await runner.cleanup()


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def require_token(what: str, token: str) -> Middleware:
    """Middleware: refuse requests without the token; an empty one admits all."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not knows(request.headers.get("Authorization", ""), token):
            raise web.HTTPUnauthorized(text=f"{what} does not know this token")
        return await handler(request)

    return guard
