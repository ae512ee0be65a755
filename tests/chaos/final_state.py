"""Dumps the server's content at the end of a round, read with a plain client, for the auditor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.chaos.stage import RUN, config_of

ZSETS = ("leases", "reserved", "ready", "again", "taken", "kept", "lottery")
HASHES = ("state", "dropped", "records", "ended", "quarantine", "versions", "tally")


def dump(folder: Path) -> dict[str, Any]:
    config = config_of(folder)
    with Redis(unix_socket_path=urlsplit(config.redis_url).path, decode_responses=True, encoding_errors="replace") as client:
        found: dict[str, Any] = {name: _scores(client, name) for name in ZSETS}
        for name in HASHES:
            key = _key(name)
            found[name] = client.hgetall(key) if client.type(key) == "hash" else {}
        found["redo"] = client.lrange(_key("redo"), 0, -1)
        found["payloads"] = {name: client.hstrlen(_key("payloads"), name) for name in client.hkeys(_key("payloads"))}
        found["server"] = {name: client.info().get(name) for name in ("redis_version", "valkey_version", "server_name")}
    found["audit"] = asyncio.run(_own_audit(config.redis_url))
    (folder / "final.json").write_text(json.dumps(found, indent=1))
    return found


def _scores(client: Redis, name: str) -> dict[str, float]:
    rows: Any = client.zrange(_key(name), 0, -1, withscores=True)
    return dict(rows)


async def _own_audit(url: str) -> list[str]:
    """Return the problems that the buffer's own audit finds."""
    server = Server(url, patience_s=30)
    try:
        return list((await RedisBuffer(server, RUN).audit()).problems)
    finally:
        await server.close()


def _key(name: str) -> str:
    return f"{{{RUN}}}:{name}"
