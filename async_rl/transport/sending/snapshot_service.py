"""Writes snapshots of live versions."""

from __future__ import annotations

import asyncio

import structlog

from async_rl.errors import WireError
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.types import VersionRecord

_log = structlog.get_logger(__name__)


class SnapshotService:
    def __init__(self, rank_sender: RankSender, every: int) -> None:
        self._rank_sender, self._every = rank_sender, every
        self._live: VersionRecord | None = None
        self._num_live = 0
        self._is_due = asyncio.Event()

    def went_live(self, record: VersionRecord) -> None:
        """Note a live version; a repeated call has no effect."""
        if self._rank_sender.snapshots is None or record == self._live:
            return
        self._live, self._num_live = record, self._num_live + 1
        if (self._num_live - 1) % self._every == 0:
            self._is_due.set()

    async def run(self) -> None:
        """
        consumes: live versions    waits for:    every Nth live version (`wire.snapshot_every`)
        produces: snapshots        unblocked by: `went_live`; a snapshot takes the version that is live when it begins
        """
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            if (record := self._live) is not None:
                await self._write(record)

    async def _write(self, record: VersionRecord) -> None:
        writing = asyncio.ensure_future(
            in_daemon_thread(lambda: self._rank_sender.write_snapshot(record), name="weight-snapshot")
        )
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a process that ends while one of its threads uses a store is aborted
            raise
        except WireError as error:
            _log.warning("could not write a snapshot", version=record.version, reason=str(error))
