"""The even-digits task with episodes that wait for their reward or between two turns, and with answers of two lengths."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from async_rl.protocols import GenerationArgs
from async_rl.types import Task, Turn
from rollout_workers.environments.even_digits import EvenDigits


@dataclass(kw_only=True)
class WaitingDigits(EvenDigits):
    """Every episode waits before its reward, as for a tool, a sandbox or a judge."""

    median_s: float = 0.4
    sigma: float = 1.0
    slow_file: str = ""
    """While this file exists, waits are ten times as long."""

    async def wait(self) -> None:
        """Wait for a lognormal time."""
        times = 10 if self.slow_file and Path(self.slow_file).exists() else 1
        await asyncio.sleep(times * random.lognormvariate(math.log(self.median_s), self.sigma))

    async def reward(self, task: Task, response: str) -> float:
        await self.wait()
        return await super().reward(task, response)


@dataclass(kw_only=True)
class TwoTurnDigits(WaitingDigits):
    """Half of the answer, a wait, then the other half: the context stays in the episode meanwhile, not in the engine."""

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        if len(turns) == 2:
            return None
        await self.wait()
        return "="

    async def trajectory_reward(self, task: Task, turns: Sequence[Turn]) -> float:
        return await EvenDigits.reward(self, task, "".join(turn.text for turn in turns))

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=self.max_tokens // 2)


@dataclass(kw_only=True)
class UnevenDigits(EvenDigits):
    """One task in eight has an answer four times as long as `max_tokens`."""

    def task(self, index: int) -> Task:
        times = 4 if self.random(index).random() < 1 / 8 else 1
        return replace(super().task(index), data={"length": times * self.max_tokens})

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=int(task.data["length"]))

    async def reward(self, task: Task, response: str) -> float:
        return await super().reward(task, response) * self.max_tokens / int(task.data["length"])
