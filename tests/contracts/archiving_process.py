"""A process that archives spent groups in small chunks and may be killed."""

from __future__ import annotations

import asyncio
from multiprocessing.synchronize import Event
from pathlib import Path

from async_rl.durable import failpoints
from buffer.archive import service as archivist
from buffer.archive.writing import ArchiveWriter
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server

GROUPS_AT_ONCE = 7
FILE_BYTES = 80_000
"""Room for about a dozen groups, so that files end and begin often."""


async def main(url: str, run: str, fence: int, folder: Path, begun: Event | None = None) -> None:
    server = Server(url, patience_s=100)
    buffer = RedisBuffer(server, run)
    try:
        with ArchiveWriter(folder, run=run, max_gb=1.0, segment_bytes=FILE_BYTES) as writer:
            if begun is not None:
                begun.set()
            assert await archivist.drain_spent(buffer, fence, writer, within_s=60)
    finally:
        await server.close()


def play(url: str, run: str, fence: int, folder: Path, failpoint: str, begun: Event) -> None:
    failpoints.arm(failpoint)
    archivist.GROUPS_AT_ONCE = GROUPS_AT_ONCE
    asyncio.run(main(url, run, fence, folder, begun))
