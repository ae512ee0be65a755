"""The replay buffer: which groups exist, who holds them, which leave next.

Programs open it here; everything else speaks to `ReplayBuffer` and `Board` in async_rl.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import buffer` stays cheap: the Redis client is imported by whoever opens a connection
    from async_rl.config import Config
    from buffer.archive.writing import ArchiveWriter
    from buffer.board import RedisBoard
    from buffer.group_store import RedisGroupStores
    from buffer.redis_buffer import RedisBuffer
    from buffer.server.client import Server


@asynccontextmanager
async def open_buffer(config: Config) -> AsyncGenerator[RedisBuffer]:
    """The run's replay buffer, connected; or BufferUnreachable."""
    from buffer.server.client import open_server

    async with open_server(config) as server:
        with open_buffer_on(server, config) as buffer:
            yield buffer


@contextmanager
def open_buffer_on(server: Server, config: Config) -> Generator[RedisBuffer]:
    """Over a connection that somebody else closes."""
    from buffer.payloads.files import Arena
    from buffer.redis_buffer import RedisBuffer

    folder = config.payload_folder
    arena = Arena(folder, max_bytes=config.redis.payloads_max_mb * 2**20) if folder is not None else None
    with arena or nullcontext():
        yield RedisBuffer(
            server,
            config.run.name,
            learner_lease_s=config.leases.learner_s,
            arena=arena,
            compress_text=config.redis.compress_text,
        )


@asynccontextmanager
async def open_board(config: Config) -> AsyncGenerator[RedisBoard]:
    """The run's board, connected; or BufferUnreachable."""
    from buffer.board import RedisBoard
    from buffer.server.client import open_server

    async with open_server(config) as server:
        yield RedisBoard(server, config.run.name)


@contextmanager
def open_group_stores(config: Config) -> Generator[RedisGroupStores]:
    """The run's stores for process groups, connected; or BufferUnreachable. Imports torch, and needs no event loop."""
    from buffer.group_store import RedisGroupStores
    from buffer.server.blocking_client import open_blocking_server

    with open_blocking_server(config) as server:
        yield RedisGroupStores(server, config.run.name)


def open_archive(config: Config) -> ArchiveWriter:
    """Where the run's spent groups are written down."""
    from buffer.archive.writing import ArchiveWriter

    limits = config.retention
    return ArchiveWriter(
        config.archive_folder, run=config.run.name, max_gb=limits.archive_max_gb, max_days=limits.archive_max_days
    )
