"""The real board, opened from what a test or a worker process knows: a server and a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import Config, ModelConfig, ModelSize, RunConfig
from async_rl.config.buffer import RedisConfig
from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import GroupStores
from async_rl.transport.wire.rendezvous import WIRE_STORE
from async_rl.types import VersionRecord
from buffer import open_buffer, open_group_stores
from buffer.board import RedisBoard
from buffer.server.client import Server, open_server


def config_of(url: str, run: str) -> Config:
    return Config(
        run=RunConfig(name=run),
        redis=RedisConfig(url=url),
        model=ModelConfig(size=ModelSize(hidden=8, layers=1, heads=1)),
        environments=(EnvironmentConfig(type="unused"),),
    )


class StageBoard(RedisBoard):
    """The run's board, with the stores that a role opens beside it."""

    def __init__(self, server: Server, run: str, stores: GroupStores) -> None:
        super().__init__(server, run)
        self.stores = stores

    @property
    def store(self) -> Store:
        return self.stores.open(WIRE_STORE)

    async def take_over(self, fence: int) -> None:
        """As if a learner with this fence had acquired the run."""
        await self._run.run_command("hset", self._run.key("learner"), "fence", fence)


@asynccontextmanager
async def board_of(url: str, run: str) -> AsyncIterator[StageBoard]:
    config = config_of(url, run)
    async with open_server(config) as server:
        with open_group_stores(config) as stores:
            yield StageBoard(server, run, stores)


async def go_live(board: StageBoard, url: str, run: str, record: VersionRecord) -> None:
    """Publish a version as the learner does. The learner stays who it was."""
    config, fence = config_of(url, run), await board.fence()
    async with open_buffer(config) as buffer:
        await buffer.publish(await buffer.acquire("test", config.limits), record)
    if fence is not None:
        await board.take_over(fence)
