"""What each script costs the server, by the server's own clock: its slow log with a threshold of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from buffer.server.scripts import NAMES, load_script

MOST = 200_000


_OTHERS = {b"HMGET": "payload_read"}
"""What is no script and keeps the server busy all the same: reading the payloads of a batch."""


def script_names() -> list[str]:
    return sorted([*NAMES, *_OTHERS.values()])


@contextmanager
def script_log(where: str) -> Iterator[dict[str, list[int]]]:
    """Filled when the block ends: microseconds of every call, by script, except the first, which compiles it."""
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
        case b"EVAL":  # every script begins with its name
            name = argument.removeprefix(b"-- ").partition(b".lua")[0].decode()
        case other:
            name = _OTHERS.get(other)
    if name is not None:
        costs.setdefault(name, []).append(entry["duration"])


_SCRIPTS = {load_script(name).sha: name for name in NAMES}
"""By the name that the server knows."""
