"""The real board, opened from what a test or a worker process knows: a server and a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_rl.buffer_config import RedisConfig
from async_rl.config import Config, ModelConfig, ModelSize, RunConfig
from async_rl.rollout_config import EnvironmentConfig
from async_rl.types import VersionRecord
from buffer import open_board, open_buffer
from buffer.board import RedisBoard


def config_of(url: str, run: str) -> Config:
    return Config(
        run=RunConfig(name=run),
        redis=RedisConfig(url=url),
        model=ModelConfig(size=ModelSize(hidden=8, layers=1, heads=1)),
        environments=(EnvironmentConfig(type="unused"),),
    )


@asynccontextmanager
async def board_of(url: str, run: str) -> AsyncIterator[RedisBoard]:
    async with open_board(config_of(url, run)) as board:
        yield board


async def go_live(url: str, run: str, record: VersionRecord) -> None:
    """Publish a version as the learner does."""
    config = config_of(url, run)
    async with open_buffer(config) as buffer:
        fence = await buffer.acquire("test", config.limits)
        await buffer.publish(fence, record)
