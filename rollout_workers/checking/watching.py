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

from async_rl.supervision import is_in_package
from async_rl.supervision.process_tree import children_of, kill_each

BEAT_S = 0.02
STALL_S = 0.2
"""A loop that stands still for so long is felt by every episode of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    seconds: float
    place: str
    """FILE:LINE in FUNCTION: the innermost one that does not belong to Python itself."""
    is_in_package: bool = False
    """An installed package is at work there, such as a client that reads certificates when it is made."""


@contextmanager
def stalls_of(loop: asyncio.AbstractEventLoop) -> Generator[list[Stall]]:
    """Filled while inside, by a thread that sees where the loop's thread is."""
    found: list[Stall] = []
    ended, owner = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not ended.wait(BEAT_S):
            turned, asked = threading.Event(), time.monotonic()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(STALL_S):
                frame = sys._current_frames().get(owner)
                if ended.is_set():  # the owner waits for this thread, and for nothing else
                    return
                place, once = _place(frame), _is_importing(frame)
                packaged = is_in_package(frame)
                while not (turned.wait(BEAT_S) or ended.is_set()):
                    pass
                if not once:
                    found.append(Stall(seconds=time.monotonic() - asked, place=place, is_in_package=packaged))

    watcher = threading.Thread(target=watch, name="stalls", daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def _is_importing(frame: FrameType | None) -> bool:
    """A library that is imported when it is first used stops a worker once in its life."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _place(frame: FrameType | None) -> str:
    standard = sysconfig.get_path("stdlib")
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith((standard, "<")):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


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
