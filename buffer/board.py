"""`Board` over Redis: membership, versions, messages and notes of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from async_rl.board.worker_reports import RECORDS
from async_rl.errors import FleetMismatch
from async_rl.protocols import Member
from async_rl.types import VersionRecord
from buffer import keys
from buffer.run_in_redis import RunInRedis, rows
from buffer.server.client import Server
from buffer.server.unexpected_replies import reading

MESSAGES_KEPT = 10_000
"""Messages kept per topic; older ones are deleted."""
RECORDS_KEPT = 256
"""Messages kept of workers' records, which may be large."""
_MEMBER = TypeAdapter(Member)


class RedisBoard:
    """The board of one run. A message may arrive twice when the server restarts."""

    def __init__(self, server: Server, run: str) -> None:
        self._run = RunInRedis(server, run)

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        reply: list[bytes] = await self._run.run_script("agree", *chain.from_iterable(facts.items()))
        raise_if_different(role, facts, dict(rows([word.decode(errors="replace") for word in reply], 2)))

    async def announce(self, member: Member, ttl_s: float) -> VersionRecord | None:
        return _parse_version(
            await self._run.run_script("announce", member.id, json.dumps(asdict(member)), round(ttl_s * 1000))
        )

    async def leave(self, member_id: str) -> None:
        await self._run.run_script("leave", member_id)

    async def members(self) -> list[Member]:
        listed = [_parse_member(text) for text in await self._run.run_script("members")]
        return sorted((member for member in listed if member is not None), key=lambda member: member.id)

    async def members_now(self) -> list[Member]:
        """As `members`, but expired ones stay where they are: for users who may only read."""
        seconds, micros = await self._run.run_command("time")
        now_ms = seconds * 1000 + micros // 1000
        ids: list[bytes] = await self._run.run_command("zrangebyscore", self._run.key("members"), f"({now_ms}", "+inf")
        listed: list[Any] = await self._run.run_command("hmget", self._run.key("member_facts"), ids) if ids else []
        found = [_parse_member(text) for text in listed]
        return sorted((member for member in found if member is not None), key=lambda member: member.id)

    async def live_version(self) -> VersionRecord | None:
        live = await self._run.run_command("hget", self._run.key("state"), "live")
        if live is None:
            return None
        return _parse_version(await self._run.run_command("hget", self._run.key("versions"), live))

    async def fence(self) -> int | None:
        fence = await self._run.run_command("hget", self._run.key("learner"), "fence")
        with reading("learner"):
            return None if fence is None else int(fence)

    async def versions(self) -> list[VersionRecord]:
        table = await self._run.run_command("hvals", self._run.key("versions"))
        with reading("versions"):
            return sorted((VersionRecord(**json.loads(row)) for row in table), key=lambda record: record.version)

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        kept = RECORDS_KEPT if topic == RECORDS else MESSAGES_KEPT
        await self._run.run_script("post", kept, json.dumps(message), topic=keys.topic(self._run.name, topic))

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        deadline = time.monotonic() + wait_s
        while found := await self._entries_after(keys.topic(self._run.name, topic), after, deadline - time.monotonic()):
            messages = [
                (position.decode(), message) for position, fields in found if (message := _parse_message(fields)) is not None
            ]
            if messages:
                return messages
            after = found[-1][0].decode()  # none of these is a message of ours: read on behind them
        return []

    async def write_note(self, name: str, text: bytes, ttl_s: float, *, fence: int) -> None:
        await self._run.run_script("write_note", fence, round(ttl_s * 1000), text, note=keys.note(self._run.name, name))

    async def note(self, name: str) -> bytes | None:
        return await self._run.run_command("get", keys.note(self._run.name, name))

    async def _entries_after(self, name: str, after: str, wait_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if wait_s <= 0:
            return _entries(await self._run.run_command("xread", {name: after}))
        block = max(1, round(wait_s * 1000))
        found = _entries(await self._run.ask("xread", lambda redis: redis.xread({name: after}, block=block), longer_s=wait_s))
        return found if found else await self._read_restarted(name, after)

    async def _read_restarted(self, name: str, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Read all messages if the stream has restarted before `after`. Positions begin with the server's clock: a server that
        was emptied and whose clock is behind assigns positions below those that were read already.
        """
        newest = await self._run.run_command("xrevrange", name, count=1)
        if not newest or _parse_position(newest[0][0].decode()) >= _parse_position(after):
            return []
        return _entries(await self._run.run_command("xread", {name: "0-0"}))


def raise_if_different(role: str, facts: Mapping[str, str], agreed: Mapping[str, str]) -> None:
    """Raise FleetMismatch if `agreed` is not empty; it holds the keys whose agreed value differs from `facts`."""
    if agreed:
        listed = "; ".join(
            f"{key} is {shortened(facts[key])} here and {shortened(value)} in the run" for key, value in sorted(agreed.items())
        )
        raise FleetMismatch(
            f"this {role} does not fit the run: {listed}; start it with the run's own configuration (config.yaml in the run's "
            "folder), or under another run.name"
        )


LONGEST_SHOWN = 60
"""Characters shown of a value; environments and models may be long."""


def shortened(value: str) -> str:
    return value if len(value) <= LONGEST_SHOWN else f"{value[: LONGEST_SHOWN - 1]}…"


def _parse_version(row: bytes | None) -> VersionRecord | None:
    with reading("versions"):
        return None if row is None else VersionRecord(**json.loads(row))


def _parse_member(text: bytes | None) -> Member | None:
    """Return the member, or None if the text is not a member that this code wrote."""
    try:
        return _MEMBER.validate_json(text if text is not None else b"", strict=True)
    except ValidationError:
        return None


def _parse_message(fields: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    try:
        message: Any = json.loads(fields.get(b"message", b""))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", message) if isinstance(message, dict) else None


def _parse_position(position: str) -> tuple[int, ...]:
    return tuple(int(part) for part in position.split("-") if part.isdecimal())


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of the one stream in a reply, whose shape depends on the Redis protocol version."""
    if not reply:
        return []
    if isinstance(reply, dict):
        nested: list[Any] = next(iter(cast("dict[bytes, list[Any]]", reply).values()))
        return cast("Any", nested[0] if nested and isinstance(nested[0], list) else nested)
    return cast("list[Any]", reply)[0][1]
