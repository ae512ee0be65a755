"""Brings a server's append-only file to the disk once a second, from outside.

With `appendfsync everysec` Redis puts off its own write for up to two seconds while a flush is on its way, and answers
nevertheless: a server that is killed then has lost what it confirmed. With `no` it writes before it answers, so a
killed server loses nothing, and flushing is left to this service: at a power loss about a second is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

FLUSH_EVERY_S = 1.0

log = logging.getLogger(__name__)


async def sync_files(folder: Path) -> None:
    """Service, until cancelled."""
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
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a rewrite has just replaced it
            continue
        try:
            os.fdatasync(file)
        finally:
            os.close(file)
