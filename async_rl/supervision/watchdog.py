"""Says where and in which task an event loop is stuck: a blocking call on it stops everything else in the process, silently."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def stall_watchdog(limit_s: float = 5.0, file: TextIO | None = None) -> Generator[None, None, None]:
    """While inside, a loop that does not turn for `limit_s` has the stacks of all threads written to stderr, once per stall."""
    watchdog = _Watchdog(asyncio.get_running_loop(), limit_s, file if file is not None else sys.stderr)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, file: TextIO) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._file = file
        self._turned = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._turned.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:  # the loop was closed
                return
            if not self._turned.wait(self._limit_s):
                self._report()
            self._stopping.wait(self._limit_s / 5)

    def _report(self) -> None:
        since = time.monotonic() - self._limit_s
        running = asyncio.current_task(self._loop)
        name = f", in {running.get_name()!r}" if running is not None else ""
        self._file.write(f"The event loop has not turned for {self._limit_s:g} s{name}; it is here:\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._turned.wait()
        if not self._stopping.is_set():
            self._file.write(f"The event loop turns again after {time.monotonic() - since:.1f} s\n")
            self._file.flush()
