"""A board over pipes instead of Redis, so that only the wire is measured."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import FileStore, Store

from async_rl.protocols import Member
from async_rl.types import VersionRecord

FENCE = 1
"""The fence of every learner: each board has one learner."""


class PipeBoard:
    """What one end posts, the other ends of its pipes read: a learner has a pipe to each worker, a worker one."""

    def __init__(self, *pipes: Connection) -> None:
        self._pipes = pipes
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._members: dict[str, Member] = {}
        self._news = asyncio.Condition()

    async def make_store(self) -> Store:
        """Where process groups meet: a file, of which the other ends are told. It lives as long as this process."""
        self._folder = TemporaryDirectory(prefix="async-rl-meeting-")
        path = f"{self._folder.name}/store"
        await self.post("store", {"path": path})
        return FileStore(path)

    async def store(self) -> Store:
        """Once the learner has made it. `listen` must run."""
        while not (told := await self.read("store", "0", 5.0)):
            pass
        return FileStore(told[0][1]["path"])

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        for pipe in self._pipes:
            loop.add_reader(pipe.fileno(), arrived.set)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                for pipe in self._pipes:
                    while pipe.poll():
                        await self._append(*json.loads(pipe.recv_bytes()))
        finally:
            for pipe in self._pipes:
                loop.remove_reader(pipe.fileno())

    async def announce(self, member: Member, ttl_s: float) -> VersionRecord | None:
        await self.post("members", asdict(member))

    async def leave(self, member_id: str) -> None: ...

    async def members(self) -> list[Member]:
        return list(self._members.values())

    async def live_version(self) -> VersionRecord | None:
        return None

    async def fence(self) -> int | None:
        return FENCE

    async def write_note(self, name: str, text: bytes, ttl_s: float, *, fence: int) -> None:
        await self.post(f"note:{name}", {"text": base64.b64encode(text).decode()})

    async def note(self, name: str) -> bytes | None:
        log = self._logs.get(f"note:{name}")
        return base64.b64decode(log[-1]["text"]) if log else None

    async def versions(self) -> list[VersionRecord]:
        return []

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        line = json.dumps([topic, message]).encode()
        for pipe in self._pipes:
            pipe.send_bytes(line)

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        log = self._logs.setdefault(topic, [])
        try:
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: len(log) > int(after))
        except TimeoutError:
            return []
        return [(str(number), message) for number, message in enumerate(log, start=1) if number > int(after)]

    async def agree(self, role: str, facts: Mapping[str, str]) -> None: ...

    async def _append(self, topic: str, message: dict[str, Any]) -> None:
        async with self._news:
            if topic == "members":
                self._members[message["id"]] = Member(**message)
            else:
                self._logs.setdefault(topic, []).append(message)
            self._news.notify_all()
