"""Asks a Redis what decides whether a run can trust it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from redis.exceptions import NoPermissionError, ResponseError

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from buffer.server.addresses import parse_address
from buffer.server.client import Server, open_server

PINGS = 100
PATIENCE_S = 5.0
"""A server that is slower than this is as good as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    url: str
    problem: str = ""
    """Why it cannot be used at all."""
    is_private: bool = False
    """Whether it is the run's own server."""
    is_remote: bool = False
    tls: bool = False
    user: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its INFO; empty: this user may not ask."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its CONFIG; empty: this user may not ask."""
    ping_s: tuple[float, ...] = ()
    ahead_s: float = 0.0
    """By how much this machine's clock is ahead of the server's, by the fastest reply."""


def hurried(config: Config) -> Config:
    """The same, with the doctor's patience."""
    patience_s = min(config.redis.connect_timeout_s, PATIENCE_S)
    return config.model_copy(update={"redis": config.redis.model_copy(update={"connect_timeout_s": patience_s})})


async def gather_redis(config: Config) -> RedisFacts:
    redis, address = config.redis, parse_address(config.redis_url)
    place: dict[str, Any] = {
        "url": address.shown,
        "is_private": not redis.url,
        "is_remote": bool(address.remote_hosts),
        "tls": address.tls,
        "user": redis.user or address.user or "",
    }
    try:
        async with open_server(hurried(config)) as server:
            pings, ahead_s = await _time(server)
            info = await _if_allowed(server, cast("Any", server.commands).info)
            settings = await _if_allowed(server, lambda: cast("Any", server.commands).config_get("*"))
    except AsyncRLError as error:
        return RedisFacts(**place, problem=str(error))
    texts = {_text(name): _text(value) for name, value in settings.items()}
    return RedisFacts(**place, info=info, settings=texts, ping_s=pings, ahead_s=ahead_s)


async def _time(server: Server) -> tuple[tuple[float, ...], float]:
    """Times of PING, and the difference of the clocks by the fastest of some TIMEs."""
    pings: list[float] = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await server.ping()
        pings.append(time.perf_counter() - began)
    differences: list[tuple[float, float]] = []
    for _ in range(10):
        sent = time.time()
        seconds, micros = await server.ask(cast("Any", server.commands).time)
        received = time.time()
        differences.append((received - sent, (sent + received) / 2 - seconds - micros / 1e6))
    return tuple(pings), min(differences)[1]


async def _if_allowed(server: Server, command: Callable[[], Awaitable[Any]]) -> Mapping[Any, Any]:
    async def ask() -> Any:
        try:
            return await command()
        except (NoPermissionError, ResponseError):  # managed servers do not know CONFIG
            return {}

    return await server.ask(ask)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
