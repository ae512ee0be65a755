"""Detects environment code that blocks the event loop, or leaves threads and processes running."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from async_rl.errors import ConfigError
from async_rl.supervision import frame_of_thread, is_importing, is_in_package, location_of
from async_rl.supervision.processes.process_tree import children_of, command_of, kill_each

BEAT_S = 0.02
STALL_S = 0.2
"""A stall of this length delays all episodes of a worker, so it is recorded."""
TELL_S = 5.0
"""A stall of this length is printed while it lasts."""
STUCK_S = 60.0
"""A stall of this length ends the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStall:
    seconds: float
    place: str
    """FILE:LINE in FUNCTION of the code that blocks."""
    is_in_package: bool = False
    """Whether an installed package blocks, such as an HTTP client that reads certificates on construction."""


@contextmanager
def stalls_of(loop: asyncio.AbstractEventLoop, environment: str) -> Generator[list[EnvironmentStall]]:
    """Collect the stalls of the loop while inside, on a thread that samples the loop's thread.

    A long stall is printed while it lasts, and ends the process after STUCK_S, because it could not be reported afterwards.
    """
    found: list[EnvironmentStall] = []
    ended, owner = threading.Event(), threading.get_ident()

    def watch() -> None:
        threads = _LongThreads(environment)
        while not ended.wait(BEAT_S):
            threads.look()
            turned, asked = threading.Event(), time.monotonic()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(STALL_S):
                frame = frame_of_thread(owner)
                if ended.is_set():  # the owner only waits for this thread to end
                    return
                place, once = _location(frame), is_importing(frame)
                packaged = is_in_package(frame)
                _wait_and_tell(turned, ended, asked, owner, environment)
                if not once:
                    found.append(EnvironmentStall(seconds=time.monotonic() - asked, place=place, is_in_package=packaged))

    watcher = threading.Thread(target=watch, name="stalls", daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


class _LongThreads:
    """Reports environment code that does not return from its thread, such as `task`: it blocks no loop, but may never end."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self) -> None:
        running = {thread.ident: thread.name for thread in threading.enumerate() if thread.name.startswith(ON_THREADS)}
        self._since = {ident: self._since.get(ident, time.monotonic()) for ident in running if ident is not None}
        for ident, since in self._since.items():
            frame = frame_of_thread(ident)
            if ident in self._told or time.monotonic() - since < TELL_S or is_importing(frame):
                continue
            self._told.add(ident)
            place = _location(frame, with_path=True)
            _tell(f"environment {self._environment!r}: {running[ident]} has not returned for {TELL_S:.0f} s, it is at {place}")


ON_THREADS = ("task of ", "plain function", "tool ")
"""Prefixes of the names of those threads."""


def _tell(sentence: str) -> None:
    print(f"async-rl env check: {sentence}", file=sys.stderr, flush=True)


def _wait_and_tell(turned: threading.Event, ended: threading.Event, since: float, owner: int, environment: str) -> None:
    """Report the stall until the loop runs again."""
    is_told = False
    while not (turned.wait(BEAT_S) or ended.is_set()):
        seconds = time.monotonic() - since
        frame = frame_of_thread(owner)
        if seconds < (STUCK_S if is_told else TELL_S) or is_importing(frame):
            continue
        place = _location(frame, with_path=True)
        said = f"environment {environment!r} has blocked the event loop for {seconds:.0f} s, at {place}"
        if is_told:
            _tell(f"{said}: it does not seem to end")
            os._exit(ConfigError.exit_code)
        _tell(f"{said}; waiting and long computations belong on a thread (asyncio.to_thread)")
        is_told = True


def _location(frame: FrameType | None, *, with_path: bool = False) -> str:
    found = location_of(frame)
    if found is None:
        return "an unknown place"
    return found.with_path if with_path else str(found)


@contextmanager
def processes_left() -> Generator[list[str]]:
    """Fill the list on leaving with processes started inside and still running, and kill them."""
    before = set(children_of(os.getpid()))
    left: list[str] = []
    yield left
    remaining = [pid for pid in children_of(os.getpid()) if pid not in before]
    left += [f"the process {pid} ({command_of(pid)[:80]})" for pid in remaining]
    kill_each(remaining)
