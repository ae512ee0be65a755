"""The log of changes of the mix of environments, as it stands in Redis: "AT ID JSON", one line a change.

What a change means is async_rl/board/environment_mix.py's; the buffer only knows from which task on it holds. An id is made of
all that came before, so that a log which lost its end and grew another one has no id in common with what it was.
"""

from __future__ import annotations

import hashlib

from async_rl.errors import AsyncRLError
from async_rl.types import MixChange
from buffer.server.unexpected_replies import reading

CHANGES_MOST = 4096
"""Every worker and every checkpoint carries them all. scripts/change_mix.lua has the same number."""


def follow_up(known: str, at: int, change: str) -> MixChange:
    """The entry behind the one with the id `known`."""
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
