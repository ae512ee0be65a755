"""Opens the run that a verb works on. The embedded server of a run that has ended is started for as long as needed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from async_rl.config import Config
from async_rl.errors import ConfigError
from buffer import open_buffer_on
from buffer.inspection import Inspection
from buffer.redis_buffer import RedisBuffer
from buffer.run_in_redis import RunInRedis
from buffer.server.client import open_server
from buffer.server.embedded.server import EmbeddedServer, is_asleep


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    config: Config
    redis: RunInRedis
    buffer: RedisBuffer
    inspection: Inspection
    was_asleep: bool
    """Whether this process has started the run's server, so that no other process uses it."""


@asynccontextmanager
async def open_run(config: Config) -> AsyncGenerator[OpenRun]:
    async with AsyncExitStack() as stack:
        if not config.redis.url and not config.redis_folder.exists():
            raise ConfigError(f"there is no run in {config.run_folder} (run.folder is relative to the current folder)")
        asleep = is_asleep(config)
        if asleep:
            await stack.enter_async_context(EmbeddedServer(config))
        server = await stack.enter_async_context(open_server(config))
        redis = RunInRedis(server, config.run.name)
        yield OpenRun(
            config=config,
            redis=redis,
            buffer=stack.enter_context(open_buffer_on(server, config)),
            inspection=Inspection(redis),
            was_asleep=asleep,
        )
