"""What code of the user's does beside its work: it holds the event loop up, or leaves something running."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from async_rl.errors import ConfigError
from async_rl.supervision import is_in_package
from async_rl.supervision.processes.process_tree import children_of, kill_each

BEAT_S = 0.02
STALL_S = 0.2
"""A loop that stands still for so long is felt by every episode of a worker."""


TELL_S = 5.0
"""A stall of this length is told while it lasts, ..."""
STUCK_S = 60.0
"""... and one of this length ends the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    seconds: float
    place: str
    """FILE:LINE in FUNCTION: the innermost one that does not belong to Python itself."""
    is_in_package: bool = False
    """An installed package is at work there, such as a client that reads certificates when it is made."""


@contextmanager
def stalls_of(loop: asyncio.AbstractEventLoop, environment: str) -> Generator[list[Stall]]:
    """Filled while inside, by a thread that sees where the loop's thread is. A stall that lasts is told at once, and ends the
    process once it is too long for a worker: a loop that never turns again could not be told of afterwards.
    """
    found: list[Stall] = []
    ended, owner = threading.Event(), threading.get_ident()

    def watch() -> None:
        threads = _LongThreads(environment)
        while not ended.wait(BEAT_S):
            threads.look()
            turned, asked = threading.Event(), time.monotonic()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(STALL_S):
                frame = sys._current_frames().get(owner)
                if ended.is_set():  # the owner waits for this thread, and for nothing else
                    return
                place, once = _place(frame), _is_importing(frame)
                packaged = is_in_package(frame)
                _wait_and_tell(turned, ended, asked, owner, environment)
                if not once:
                    found.append(Stall(seconds=time.monotonic() - asked, place=place, is_in_package=packaged))

    watcher = threading.Thread(target=watch, name="stalls", daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


class _LongThreads:
    """Code of the environment on threads of its own, such as `task`: it holds no loop up there, but it may never end."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self) -> None:
        running = {thread.ident: thread.name for thread in threading.enumerate() if thread.name.startswith(ON_THREADS)}
        self._since = {ident: self._since.get(ident, time.monotonic()) for ident in running if ident is not None}
        for ident, since in self._since.items():
            frame = sys._current_frames().get(ident)
            if ident in self._told or time.monotonic() - since < TELL_S or _is_importing(frame):
                continue
            self._told.add(ident)
            place = _place(frame, whole_path=True)
            _tell(f"environment {self._environment!r}: {running[ident]} has not returned for {TELL_S:.0f} s, it is at {place}")


ON_THREADS = ("task of ", "plain function", "tool ")
"""As their threads are called."""


def _tell(sentence: str) -> None:
    print(f"async-rl env check: {sentence}", file=sys.stderr, flush=True)


def _wait_and_tell(turned: threading.Event, ended: threading.Event, since: float, owner: int, environment: str) -> None:
    """Until the loop turns again."""
    is_told = False
    while not (turned.wait(BEAT_S) or ended.is_set()):
        seconds = time.monotonic() - since
        frame = sys._current_frames().get(owner)
        if seconds < (STUCK_S if is_told else TELL_S) or _is_importing(frame):
            continue
        place = _place(frame, whole_path=True)
        said = f"environment {environment!r} has held the event loop up for {seconds:.0f} s, at {place}"
        if is_told:
            _tell(f"{said}: it does not seem to end")
            os._exit(ConfigError.exit_code)
        _tell(f"{said}; what waits or computes for long belongs on a thread (asyncio.to_thread)")
        is_told = True


def _is_importing(frame: FrameType | None) -> bool:
    """A library that is imported when it is first used stops a worker once in its life."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _place(frame: FrameType | None, *, whole_path: bool = False) -> str:
    standard = sysconfig.get_path("stdlib")
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith((standard, "<")):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    file = frame.f_code.co_filename
    return f"{file if whole_path else Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextmanager
def processes_left() -> Generator[list[str]]:
    """Afterwards: those that are still there and were not before. They are ended."""
    before = set(children_of(os.getpid()))
    left: list[str] = []
    yield left
    remaining = [pid for pid in children_of(os.getpid()) if pid not in before]
    left += [f"the process {pid} ({_command(pid)})" for pid in remaining]
    kill_each(remaining)


def _command(pid: int) -> str:
    try:
        words: Sequence[bytes] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone meanwhile"
    return b" ".join(words).decode(errors="replace").strip()[:80]
