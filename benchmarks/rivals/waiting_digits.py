"""The even-digits task with episodes that wait before their reward, as for a tool, a sandbox or a judge."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

from async_rl.types import Task
from rollout_workers.environments.even_digits import EvenDigits


@dataclass(kw_only=True)
class WaitingDigits(EvenDigits):
    median_s: float = 0.4
    sigma: float = 1.0

    async def reward(self, task: Task, response: str) -> float:
        await asyncio.sleep(random.lognormvariate(math.log(self.median_s), self.sigma))
        return await super().reward(task, response)
