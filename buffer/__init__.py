"""The replay buffer: which groups exist, which worker or learner holds them, which are sampled next.

Entry points open it here; all other code uses the protocols `ReplayBuffer` and `Board` of async_rl. Read redis_buffer.py first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import buffer` stays cheap: the Redis client is imported when a connection is opened
    from async_rl.config import Config
    from buffer.archive.writing import ArchiveWriter
    from buffer.board import RedisBoard
    from buffer.group_store import RedisGroupStores
    from buffer.redis_buffer import RedisBuffer
    from buffer.server.client import Server


@asynccontextmanager
async def open_buffer(config: Config) -> AsyncGenerator[RedisBuffer]:
    """Connect to the run's replay buffer. Raises BufferUnreachable."""
    from buffer.server.client import open_server

    async with open_server(config) as server:
        with open_buffer_on(server, config) as buffer:
            yield buffer


@contextmanager
def open_buffer_on(server: Server, config: Config) -> Generator[RedisBuffer]:
    """Open the run's buffer over a connection that the caller opened and closes."""
    from buffer.payloads.files import PayloadFolder
    from buffer.redis_buffer import RedisBuffer

    folder = config.payload_folder
    payload_folder = PayloadFolder(folder, max_bytes=config.redis.payloads_max_mb * 2**20) if folder is not None else None
    with payload_folder or nullcontext():
        yield RedisBuffer(
            server,
            config.run.name,
            learner_lease_s=config.leases.learner_s,
            payload_folder=payload_folder,
            compress_text=config.redis.compress_text,
        )


@asynccontextmanager
async def open_board(config: Config) -> AsyncGenerator[RedisBoard]:
    """Connect to the run's board. Raises BufferUnreachable."""
    from buffer.board import RedisBoard
    from buffer.server.client import open_server

    async with open_server(config) as server:
        yield RedisBoard(server, config.run.name)


@asynccontextmanager
async def open_buffer_and_board(config: Config) -> AsyncGenerator[tuple[RedisBuffer, RedisBoard]]:
    """Connect to both, each over connections of its own. Raises BufferUnreachable."""
    async with open_buffer(config) as buffer, open_board(config) as board:
        yield buffer, board


@contextmanager
def open_group_stores(config: Config) -> Generator[RedisGroupStores]:
    """Connect to the run's stores for process groups; needs no event loop and imports torch. Raises BufferUnreachable."""
    from buffer.group_store import RedisGroupStores
    from buffer.server.blocking_client import open_blocking_server

    with open_blocking_server(config) as server:
        yield RedisGroupStores(server, config.run.name)


def open_archive(config: Config) -> ArchiveWriter:
    """Open the archive that the run's spent groups are appended to."""
    from buffer.archive.writing import ArchiveWriter

    limits = config.retention
    return ArchiveWriter(
        config.archive_folder, run=config.run.name, max_gb=limits.archive_max_gb, max_days=limits.archive_max_days
    )
