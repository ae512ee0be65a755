"""Moves spent groups from the buffer to the archive, without delaying training.

A group is discarded from the buffer only when it is durable on disk: a crash in between archives it again, and the writer
skips it. A failing disk delays this service alone: the buffer keeps spent groups for a bounded number of steps, then deletes
and counts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from async_rl.durable.failpoints import define, failpoint
from async_rl.types import SpentGroup

GROUPS_AT_ONCE = 32
"""Groups per read from the buffer and per fsync."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

log = logging.getLogger(__name__)
define("archive.discarded")
T = TypeVar("T")


class SpentGroups(Protocol):
    """The part of `ReplayBuffer` that this service uses."""

    async def spent_groups(self, limit: int, /) -> Sequence[SpentGroup]:
        """Return spent groups that are kept, oldest first."""
        ...

    async def discard(self, fence: int, ids: Sequence[str], /) -> object: ...


class GroupWriter(Protocol):
    def append(self, groups: Sequence[SpentGroup]) -> int:
        """Block until the groups are durable. Raises OSError if they are not."""
        ...


async def archive_spent(buffer: SpentGroups, fence: int, writer: GroupWriter, *, wake: asyncio.Event) -> None:
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
            await _wait_for_wake(wake, within_s=pause_s)
        else:
            if pause_s:
                log.info("the archive can be written again")
            pause_s = 0.0
            await wake.wait()


async def drain_spent(buffer: SpentGroups, fence: int, writer: GroupWriter, *, within_s: float) -> bool:
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


async def _archive_all(buffer: SpentGroups, fence: int, writer: GroupWriter) -> None:
    while groups := await buffer.spent_groups(GROUPS_AT_ONCE):
        try:
            await _in_thread(lambda groups=groups: writer.append(groups))
        except OSError as error:
            raise _DiskRefused(str(error)) from error
        await buffer.discard(fence, [group.id for group in groups])
        failpoint("archive.discarded")


async def _in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread. A cancelled call is waited for: a thread cannot be stopped, and two writers must not overlap."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def _wait_for_wake(wake: asyncio.Event, *, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await wake.wait()
    except TimeoutError:
        return
