"""An environment whose episodes take a while, one of which hangs: a process is then killed at a known moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from async_rl.types import Task
from rollout_workers.environments.even_digits import EvenDigits


@dataclass(kw_only=True)
class Paced(EvenDigits):
    pace_s: float = 0.1
    hangs_at: int = -1
    """The first episode of this task never ends; the ones after it do."""
    marker: str = ""
    """A file that appears when that episode hangs."""

    async def reward(self, task: Task, response: str) -> float:
        if task.key.endswith(f"/{self.hangs_at}") and not Path(self.marker).exists():
            Path(self.marker).touch()
            await asyncio.Event().wait()
        await asyncio.sleep(self.pace_s)
        return await super().reward(task, response)
