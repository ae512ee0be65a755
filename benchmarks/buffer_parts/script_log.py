"""Measures each script's time on the server, with the slow log at a threshold of 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from buffer.server.scripts import NAMES, load_script

MOST = 200_000


_OTHERS = {b"HMGET": "payload_read"}
"""A command that is no script but keeps the server busy, too: reading the payloads of a batch."""


def script_names() -> list[str]:
    return sorted([*NAMES, *_OTHERS.values()])


@contextmanager
def script_log(where: str) -> Iterator[dict[str, list[int]]]:
    """Yield script -> microseconds of each call, filled when the block ends; without the first call, which compiles it."""
    costs: dict[str, list[int]] = {}
    with Redis.from_url(where) as redis:
        redis.config_set("slowlog-max-len", MOST)
        redis.config_set("slowlog-log-slower-than", 0)
        redis.slowlog_reset()
        yield costs
        redis.config_set("slowlog-log-slower-than", -1)
        for entry in redis.slowlog_get(MOST):
            _count(entry, costs)


def _count(entry: dict[str, Any], costs: dict[str, list[int]]) -> None:
    command, _, rest = entry["command"].partition(b" ")
    argument = rest if rest.startswith(b"-- ") else rest.partition(b" ")[0]
    match command.upper():
        case b"EVALSHA":
            name = _SCRIPTS.get(argument.decode())
        case b"EVAL":  # every script begins with a comment that names it
            name = argument.removeprefix(b"-- ").partition(b".lua")[0].decode()
        case other:
            name = _OTHERS.get(other)
    if name is not None:
        costs.setdefault(name, []).append(entry["duration"])


_SCRIPTS = {load_script(name).sha: name for name in NAMES}
"""SHA of a script on the server -> its name."""
