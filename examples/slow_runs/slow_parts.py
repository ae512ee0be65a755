"""Parts that make a run slow on purpose, each in one way: see the four configurations beside this file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from async_rl import Task
from rollout_workers.environments.counting import Counting
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.rollout_engine import EngineSetup


@dataclass(kw_only=True)
class BlockedCounting(Counting):
    """Counting whose reward calls a library that blocks: nothing else of the worker runs meanwhile."""

    blocks_s: float = 6.0
    every: int = 150
    """Blocks in one of so many episodes."""
    _played: int = field(init=False, default=0)

    async def reward(self, task: Task, response: str) -> float:
        self._played += 1
        if self._played % self.every == 0:
            time.sleep(self.blocks_s)  # noqa: ASYNC251  # the mistake that this run shows
        return await super().reward(task, response)


@dataclass(kw_only=True)
class SlowlyGradedCounting(Counting):
    """Counting whose reward asks a slow judge."""

    grader_s: float = 3.0

    async def reward(self, task: Task, response: str) -> float:
        await asyncio.sleep(self.grader_s)
        return await super().reward(task, response)


class SlowlyFedEngine(MegatronEngine):
    """Megatron's engine behind a slow link: weights take seconds to arrive."""

    link_s = 3.0

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup.shape, setup.tokenizer, setup.worker, setup.sampling, device=setup.devices[0], seed=setup.seed)

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        await asyncio.sleep(self.link_s)
        await super().swap(version, tensors)
