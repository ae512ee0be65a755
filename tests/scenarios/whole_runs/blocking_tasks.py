"""Environments for whole runs: one whose code blocks its worker's event loop, and one that is well."""

from __future__ import annotations

import time
from dataclasses import dataclass

from async_rl.types import Task
from rollout_workers.environments.even_digits import EvenDigits


@dataclass(kw_only=True)
class Blocks(EvenDigits):
    async def reward(self, task: Task, response: str) -> float:
        while True:
            time.sleep(0.05)  # noqa: ASYNC251  # that is the mistake


class Awaits(EvenDigits):
    pass
