"""Environments of whole runs: episodes that take a while, one of which hangs, and episodes with long rows of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Sample, Task, VersionSpan
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


@dataclass(kw_only=True)
class Lengthy(Paced):
    """Of ten tasks, one has rows of `long` tokens and two, one after the other, have rows of `too_long` tokens."""

    long: int
    too_long: int

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        played = await super().rollout(task, inference, context)
        lengths = {3: self.long, 6: self.too_long, 7: self.too_long}
        length = lengths.get(int(task.key.rpartition("/")[2]) % 10)
        return replace(played, samples=tuple(_repeated(each, length) for each in played.samples)) if length else played


def _repeated(sample: Sample, length: int) -> Sample:
    """The row again and again, until it has `length` tokens or a few more."""
    times = -(-length // len(sample))
    return Sample(
        token_ids=np.tile(sample.token_ids, times),
        loss_mask=np.tile(sample.loss_mask, times),
        logprobs=np.tile(sample.logprobs, times),
        versions=tuple(
            VersionSpan(version=span.version, start=span.start + offset, stop=span.stop + offset)
            for offset in range(0, times * len(sample), len(sample))
            for span in sample.versions
        ),
    )
