"""The reference implementation of `Board`, in memory; for tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from async_rl.protocols import Member
from async_rl.types import VersionRecord
from buffer.board import raise_if_different
from buffer.reference.memory_buffer import MemoryBuffer


class MemoryBoard:
    def __init__(self, buffer: MemoryBuffer) -> None:
        self._buffer = buffer
        self._facts: dict[str, str] = {}
        self._members: dict[str, tuple[float, Member]] = {}
        self._topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._notes: dict[str, tuple[float, bytes]] = {}

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        agreed = {key: self._facts.setdefault(key, value) for key, value in facts.items()}
        raise_if_different(role, facts, {key: value for key, value in agreed.items() if facts[key] != value})

    async def announce(self, member: Member, ttl_s: float) -> VersionRecord | None:
        self._members[member.id] = (self._buffer.now() + ttl_s, member)
        return await self.live_version()

    async def leave(self, member_id: str) -> None:
        self._members.pop(member_id, None)

    async def members(self) -> list[Member]:
        now = self._buffer.now()
        listed = [member for expires, member in self._members.values() if expires > now]
        return sorted(listed, key=lambda member: member.id)

    async def live_version(self) -> VersionRecord | None:
        return self._buffer.published[-1] if self._buffer.published else None

    async def fence(self) -> int | None:
        return self._buffer.fence

    async def versions(self) -> list[VersionRecord]:
        return self._buffer.published

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        self._topics[topic].append(json.loads(json.dumps(message)))
        self._buffer.notify()

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        first = len(self._topics[topic]) if after == "$" else int(after.partition("-")[0])
        messages = await self._buffer.wait_for(lambda: self._topics[topic][first:], wait_s)
        return [(f"{position}-0", message) for position, message in enumerate(messages, start=first + 1)]

    async def write_note(self, name: str, text: bytes, ttl_s: float, *, fence: int) -> None:
        if fence == self._buffer.fence:
            self._notes[name] = (self._buffer.now() + ttl_s, text)

    async def note(self, name: str) -> bytes | None:
        expires, text = self._notes.get(name, (self._buffer.now(), b""))
        return text if expires > self._buffer.now() else None
