"""Flushes the embedded server's append-only file to the disk once a second.

With `appendfsync everysec` Redis delays its own write for up to two seconds while a flush is in progress, but replies: a server
that is killed then loses confirmed changes. With `no` it writes before it replies, so a killed server loses nothing, and this
service does the flushing: a power loss costs about one second of changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

FLUSH_EVERY_S = 1.0

log = logging.getLogger(__name__)


async def sync_files(folder: Path) -> None:
    """Run until cancelled.

    consumes: what Redis has written to its file   waits for:    FLUSH_EVERY_S
    produces: a file that survives a power loss    unblocked by: the clock
    """
    failed = False
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        try:
            await asyncio.to_thread(_flush, folder)
            failed = False
        except OSError as error:
            if not failed:
                log.warning("the data of the embedded Redis cannot be flushed to the disk: %s", error.strerror)
            failed = True


def _flush(folder: Path) -> None:
    for path in (*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")):
        with suppress(FileNotFoundError), path.open("rb") as file:  # a rewrite may have replaced it
            os.fdatasync(file.fileno())
