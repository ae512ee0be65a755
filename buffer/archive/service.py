"""Moves spent groups from the buffer to the archive, without delaying training.

A group is discarded from the buffer only when it is durable on disk: a crash in between archives it again, and the writer
skips it. A failing disk delays this service alone: the buffer keeps spent groups for a bounded number of steps, then deletes
and counts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from async_rl.durable.failpoints import define, failpoint
from async_rl.replay_protocol import ReplayBuffer
from async_rl.supervision import working
from async_rl.types import SpentGroup
from buffer.archive.writing import ArchiveWriter

GROUPS_AT_ONCE = 32
"""Groups per read from the buffer and per fsync."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

log = logging.getLogger(__name__)
define("archive.discarded")


async def archive_spent(buffer: ReplayBuffer, fence: int, writer: ArchiveWriter, *, wake: asyncio.Event) -> None:
    """Archive spent groups until cancelled.

    consumes: spent groups (buffer.spent_groups)   waits for:    spent groups
    produces: records (writer.append)              unblocked by: `wake`, set after each checkpoint; the end of a pause
    """
    pause_s = 0.0
    while True:
        wake.clear()
        try:
            await _archive_all(buffer, fence, writer)
        except _DiskRefused as refusal:
            if not pause_s:
                log.warning("spent groups stay in the buffer, because the archive cannot be written: %s", refusal)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await wake.wait()
        else:
            if pause_s:
                log.info("the archive can be written again")
            pause_s = 0.0
            await wake.wait()


async def drain_spent(buffer: ReplayBuffer, fence: int, writer: ArchiveWriter, *, within_s: float) -> bool:
    """Archive what is left after `archive_spent` has ended. False if `within_s` or the disk did not suffice: the rest stays in
    the buffer.
    """
    try:
        async with asyncio.timeout(within_s):
            await _archive_all(buffer, fence, writer)
    except (TimeoutError, _DiskRefused) as problem:
        reason = str(problem) if isinstance(problem, _DiskRefused) else f"{within_s:g} s were not enough"
        log.warning("spent groups stay in the buffer until the run continues: %s", reason)
        return False
    return True


class _DiskRefused(Exception):
    """An OSError of the writer, in the operating system's words."""


async def _archive_all(buffer: ReplayBuffer, fence: int, writer: ArchiveWriter) -> None:
    while groups := await buffer.spent_groups(GROUPS_AT_ONCE):
        try:
            await _append(writer, groups)
        except OSError as error:
            raise _DiskRefused(str(error)) from error
        await buffer.discard(fence, [group.id for group in groups])
        failpoint("archive.discarded")


async def _append(writer: ArchiveWriter, groups: Sequence[SpentGroup]) -> None:
    """Append in a thread. A cancelled call is waited for: a thread cannot be stopped, and two writers must not overlap."""
    running = asyncio.get_running_loop().run_in_executor(None, working("the archive")(writer.append), groups)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
