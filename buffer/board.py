"""The board over Redis: small shared facts of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from async_rl.errors import FleetMismatch
from async_rl.protocols import Member
from async_rl.types import VersionRecord
from buffer import keys
from buffer.redis_client import Server
from buffer.script_library import ScriptLibrary

MESSAGES_KEPT = 10_000
"""Of each topic."""


class RedisBoard:
    """`Board` of one run. Unlike the buffer's, its messages may arrive twice when the server restarts."""

    def __init__(self, server: Server, run: str) -> None:
        self._server = server
        self._run = run
        self._scripts = ScriptLibrary(server, [*keys.board_keys(run), keys.state(run), keys.versions(run)])

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        reply: list[bytes] = await self._scripts.run("agree", *(word for fact in facts.items() for word in fact))
        agreed = dict(zip([key.decode() for key in reply[::2]], [value.decode() for value in reply[1::2]], strict=True))
        raise_if_different(role, facts, agreed)

    async def announce(self, member: Member, ttl_s: float) -> None:
        await self._scripts.run("announce", member.id, json.dumps(asdict(member)), round(ttl_s * 1000))

    async def leave(self, member_id: str) -> None:
        await self._scripts.run("leave", member_id)

    async def members(self) -> list[Member]:
        listed = [Member(**json.loads(said)) for said in await self._scripts.run("members")]
        return sorted(listed, key=lambda member: member.id)

    async def live_version(self) -> VersionRecord | None:
        row = await self._scripts.run("live_version")
        return None if row is None else VersionRecord(**json.loads(row))

    async def versions(self) -> list[VersionRecord]:
        rows = await self._server.ask(lambda: self._redis.hvals(keys.versions(self._run)))
        return sorted((VersionRecord(**json.loads(row)) for row in rows), key=lambda record: record.version)

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        script = ScriptLibrary(self._server, [keys.topic(self._run, topic)])
        await script.run("post", MESSAGES_KEPT, json.dumps(message))

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        name = keys.topic(self._run, topic)
        if wait_s <= 0:
            found = await self._server.ask(lambda: self._redis.xread({name: after}))
        else:
            # A reply may take as long as `wait_s`, so this goes over the connections for waiting.
            block, waits = max(1, round(wait_s * 1000)), cast("Any", self._server.waits)
            found = await self._server.ask(lambda: waits.xread({name: after}, block=block), longer_s=wait_s)
        return [(position.decode(), json.loads(fields[b"message"])) for position, fields in _entries(found)]

    @property
    def _redis(self) -> Any:
        return self._server.commands


def raise_if_different(role: str, facts: Mapping[str, str], agreed: Mapping[str, str]) -> None:
    """`agreed` holds only what differs."""
    if agreed:
        listed = "; ".join(f"{key} is {facts[key]} here and {value} in the run" for key, value in sorted(agreed.items()))
        raise FleetMismatch(f"this {role} does not fit the run: {listed}")


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of the one stream asked for; the shape around them depends on the protocol's version."""
    if not reply:
        return []
    if isinstance(reply, dict):
        nested: list[Any] = next(iter(cast("dict[bytes, list[Any]]", reply).values()))
        return cast("Any", nested[0] if nested and isinstance(nested[0], list) else nested)
    return cast("list[Any]", reply)[0][1]
