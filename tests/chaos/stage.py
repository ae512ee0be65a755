"""What a role gets: its folder, the way to the server, and means to report its state to the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from random import Random

from async_rl.config import Config
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.chaos.journals import Journal
from tests.chaos.plan import Plan

RUN = "chaos"
STATE_BYTES = 32
STARTING = "starting"
"""The state of a process that has not reported any yet."""
SERVING = "serving"
"""The state of a server role whose server answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    plan: Plan
    folder: Path
    """Folder of the round."""
    role: str
    slot: int
    """Index of this process in `states`, and its id in `progress`."""
    life: int
    states: mmap
    """Shared with the supervisor, which records the state of a process it kills."""
    progress: int
    """A pipe with one byte per journalled act."""
    journal: Journal

    @property
    def config(self) -> Config:
        return config_of(self.folder)

    @property
    def checkpoints(self) -> Path:
        folder = self.folder / "checkpoints"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def random(self) -> Random:
        return self.plan.random(self.role, self.life)

    def set_state(self, state: str) -> None:
        start = self.slot * STATE_BYTES
        self.states[start : start + STATE_BYTES] = state.encode().ljust(STATE_BYTES)

    def report_act(self) -> None:
        """Report one act; the supervisor counts acts to time its kills."""
        os.write(self.progress, bytes([self.slot]))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[RedisBuffer, RedisBoard]]:
        server = Server(self.config.redis_url, patience_s=60)
        try:
            yield RedisBuffer(server, RUN, learner_lease_s=self.plan.settings.learner_lease_s), RedisBoard(server, RUN)
        finally:
            await server.close()


def config_of(folder: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": RUN, "folder": folder},
            "redis": {"connect_timeout_s": 60},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "even_digits"}],
        }
    )


def stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop
