"""The stages of an episode: each has its own time, and what runs out of it or breaks is said to be of that stage.

An agent marks them with `async with stage("reward"):`; generations are marked for it. How long a stage may take stands in
the configuration and reaches it through a context variable, so that agents need not pass it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Literal

from async_rl.config.rollout import TimeoutsConfig

Stage = Literal["task", "inference", "environment", "reward"]

_KEYS: dict[Stage, str] = {
    "task": "task_s",
    "inference": "generation_s",
    "environment": "observation_s",
    "reward": "reward_s",
}

_timeouts: ContextVar[TimeoutsConfig | None] = ContextVar("timeouts", default=None)


class StageTimeout(TimeoutError):
    def __init__(self, stage: Stage, limit_s: float) -> None:
        super().__init__(f"no end within {limit_s:g} s (worker.timeouts.{_KEYS[stage]})")
        self.stage: Stage = stage


@contextmanager
def apply_timeouts(timeouts: TimeoutsConfig | None) -> Generator[None]:
    """To the stages inside; None leaves those in force that are."""
    if timeouts is None:
        yield
        return
    before = _timeouts.set(timeouts)
    try:
        yield
    finally:
        _timeouts.reset(before)


def current_timeouts() -> TimeoutsConfig:
    return found if (found := _timeouts.get()) is not None else _NONE


@asynccontextmanager
async def stage(name: Stage, timeouts: TimeoutsConfig | None = None) -> AsyncGenerator[None]:
    """Raises StageTimeout where the stage has not ended in time. `timeouts` None means those in force here."""
    limit_s: float = getattr(timeouts if timeouts is not None else current_timeouts(), _KEYS[name])
    deadline = asyncio.timeout(limit_s if limit_s > 0 else None)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if deadline.expired():
            raise StageTimeout(name, limit_s) from error
        raise


_NONE = TimeoutsConfig(task_s=0)
