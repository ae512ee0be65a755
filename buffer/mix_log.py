"""The log of changes of the mix of environments, as stored in Redis: one "AT ID JSON" per change.

AT is the index of the first task that the change applies to; async_rl/board/environment_mix.py interprets the JSON. ID is a
hash over the whole log up to this change, so a log that lost its end and continued differently shares no later id with it.
"""

from __future__ import annotations

import hashlib

from async_rl.errors import AsyncRLError
from async_rl.types import MixChange
from buffer.server.unexpected_replies import reading

CHANGES_MOST = 4096
"""Limit of changes: workers and checkpoints carry the whole log. scripts/change_mix.lua has the same number."""


def follow_up(known: str, at: int, change: str) -> MixChange:
    """Return the entry that follows the one with the id `known`."""
    words = f"{known} {at} {change}"
    return MixChange(at=at, id=hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest(), change=change)


def write(change: MixChange) -> str:
    return f"{change.at} {change.id} {change.change}"


def parse(line: bytes) -> MixChange:
    with reading("mix"):
        at, name, change = line.decode().split(" ", 2)
        return MixChange(at=int(at), id=name, change=change)


def full() -> AsyncRLError:
    return AsyncRLError(f"the mix of environments was changed {CHANGES_MOST} times: go on as another run, from a checkpoint")
