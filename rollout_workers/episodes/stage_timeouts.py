"""Time limits of the stages of an episode. A stage that runs out of time fails the episode at the boundary of that name.

An agent marks its stages with `async with stage("reward"):`; generations are marked for it. The limits come from
`worker.timeouts` through a context variable, so agents need not pass them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Literal

from async_rl.config.rollout import TimeoutsConfig
from async_rl.imports.old_names import old_names
from rollout_workers.episodes.group_timeline import current_clock
from rollout_workers.episodes.rewards import RewardFailed

Stage = Literal["task", "inference", "environment", "reward"]

_KEYS: dict[Stage, str] = {
    "task": "task_s",
    "inference": "generation_s",
    "environment": "observation_s",
    "reward": "reward_s",
}

_NO_LIMITS = TimeoutsConfig(task_s=0)
_timeouts: ContextVar[TimeoutsConfig] = ContextVar("timeouts", default=_NO_LIMITS)


class StageTimeout(TimeoutError):
    """A stage of an episode did not end within its limit."""

    def __init__(self, stage: Stage, limit_s: float) -> None:
        super().__init__(f"no end within {limit_s:g} s (worker.timeouts.{_KEYS[stage]})")
        self.stage: Stage = stage


@contextmanager
def apply_timeouts(timeouts: TimeoutsConfig | None) -> Generator[None]:
    """Set the limits of the stages inside; None keeps the current ones."""
    before = _timeouts.set(timeouts if timeouts is not None else current_timeouts())
    try:
        yield
    finally:
        _timeouts.reset(before)


def current_timeouts() -> TimeoutsConfig:
    """The limits that apply here; no limits outside of `apply_timeouts`."""
    return _timeouts.get()


@asynccontextmanager
async def stage(name: Stage, timeouts: TimeoutsConfig | None = None) -> AsyncGenerator[None]:
    """Limit the time of the block, and measure it. Raises StageTimeout when it runs out. `timeouts` None: the current ones."""
    limit_s: float = getattr(timeouts if timeouts is not None else current_timeouts(), _KEYS[name])
    deadline = asyncio.timeout(limit_s if limit_s > 0 else None)
    clock = current_clock() if name != "inference" else None  # `WatchedInference` measures generations
    since = clock.timeline.now() if clock is not None else 0.0
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if deadline.expired():
            raise StageTimeout(name, limit_s) from error
        raise
    finally:
        if clock is not None:
            clock.add(name, since)


@asynccontextmanager
async def scoring() -> AsyncGenerator[None]:
    """Limit the time of the block by `worker.timeouts.reward_s`. Raises RewardFailed from what it raises."""
    try:
        async with stage("reward"):
            yield
    except Exception as error:
        raise RewardFailed from error


__getattr__ = old_names(__name__)
