"""Waits for what other processes do, which cannot be awaited: each has a bound, and says what it waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

PATIENCE_S = 280.0
"""For anything that must happen at all. Importing torch in several processes dominates, on a busy machine more so."""


def _pause_s(check_s: float) -> float:
    """Return the time until the next look: looking takes at most a fifth of a core, which others need."""
    return min(max(0.02, 4 * check_s), 0.5)


class Watched(Protocol):
    """A process whose end makes waiting vain."""

    @property
    def output(self) -> str: ...

    def has_ended(self) -> bool: ...


def until(reached: Callable[[], T | None], what: str, *, while_alive: Watched | None = None, within_s: float = PATIENCE_S) -> T:
    """Return what `reached` returns once that is true."""
    deadline = time.monotonic() + within_s
    while True:
        ended = while_alive is not None and while_alive.has_ended()
        began = time.thread_time()
        if found := reached():
            return found
        check_s = time.thread_time() - began
        if ended or time.monotonic() > deadline:
            said = f"; it said:\n{while_alive.output}" if while_alive is not None else ""
            raise AssertionError(f"waited in vain until {what}{' (the program has ended)' if ended else ''}{said}")
        time.sleep(_pause_s(check_s))


async def eventually(holds: Callable[[], Awaitable[bool]], what: str, *, within_s: float = PATIENCE_S) -> None:
    """As `until`, without blocking the loop."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                began = time.thread_time()
                if await holds():
                    return
                await asyncio.sleep(_pause_s(time.thread_time() - began))
    except TimeoutError:
        raise AssertionError(f"waited in vain for {within_s:g} s until {what}") from None
