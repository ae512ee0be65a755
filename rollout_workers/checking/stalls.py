"""Detects environment code that blocks the event loop, or leaves threads and processes running."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.supervision import LoopStall, stall_watchdog
from async_rl.supervision.liveness.watchdog import watched
from async_rl.supervision.liveness.whereabouts import CodeLocation, frame_of_thread, is_importing, is_in_package, location_of
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
def stalls_of(environment: str) -> Generator[list[EnvironmentStall]]:
    """Collect the stalls of the running event loop while inside.

    A long stall is printed while it lasts, and ends the process after STUCK_S, because it could not be reported afterwards.
    """
    record, threads = _StallRecord(environment), _LongThreads(environment)
    with (
        Path(os.devnull).open("w") as nowhere,
        watched(threads.look, every_s=BEAT_S),
        stall_watchdog(STALL_S, nowhere, on_stall=record.begin, on_beat=record.go_on),
    ):
        yield record.stalls


class _StallRecord:
    """Callbacks for `stall_watchdog`, made on the thread of the event loop."""

    def __init__(self, environment: str) -> None:
        self.stalls: list[EnvironmentStall] = []
        self._environment, self._thread = environment, threading.get_ident()
        self._is_counted = self._is_told = False

    def begin(self, stall: LoopStall) -> None:
        self._is_counted, self._is_told = not stall.is_importing, False
        if self._is_counted:
            packaged = is_in_package(frame_of_thread(self._thread))
            self.stalls.append(EnvironmentStall(seconds=stall.seconds, place=str(stall.place), is_in_package=packaged))

    def go_on(self, stall: LoopStall) -> None:
        if self._is_counted:
            self.stalls[-1] = replace(self.stalls[-1], seconds=stall.seconds)
        if stall.is_importing or stall.seconds < (STUCK_S if self._is_told else TELL_S):
            return
        place = _with_path(stall.place)
        said = f"environment {self._environment!r} has blocked the event loop for {stall.seconds:.0f} s, at {place}"
        if self._is_told:
            _tell(f"{said}: it does not seem to end")
            os._exit(ConfigError.exit_code)
        _tell(f"{said}; waiting and long computations belong on a thread (asyncio.to_thread)")
        self._is_told = True


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
            place = _with_path(location_of(frame))
            _tell(f"environment {self._environment!r}: {running[ident]} has not returned for {TELL_S:.0f} s, it is at {place}")


ON_THREADS = ("task of ", "plain function", "tool ")
"""Prefixes of the names of those threads."""


def _tell(sentence: str) -> None:
    print(f"async-rl env check: {sentence}", file=sys.stderr, flush=True)


def _with_path(place: CodeLocation | None) -> str:
    return place.with_path if place is not None else "an unknown place"


@contextmanager
def processes_left() -> Generator[list[str]]:
    """Fill the list on leaving with processes started inside and still running, and kill them."""
    before = set(children_of(os.getpid()))
    left: list[str] = []
    yield left
    remaining = [pid for pid in children_of(os.getpid()) if pid not in before]
    left += [f"the process {pid} ({command_of(pid)[:80]})" for pid in remaining]
    kill_each(remaining)
