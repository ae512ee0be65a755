"""The watchdog thread of a process: detects blocked event loops and hanging threads.

What is watched is a check that the thread calls periodically. A stall is reported; past its deadline the process ends with an
error that names it. Its supervisor restarts it, and what it held in Redis is released when leases expire. The same thread sends
the process' heartbeat to its supervisor (sign_of_life.py), so that its own death is noticed too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from async_rl.errors import AsyncRLError, ServiceStopped
from async_rl.supervision.liveness.whereabouts import CodeLocation, frame_of_thread, is_importing, location_of

BEAT_S = 1.0
REPORT_AFTER_S = 5.0
IMPORTS = 5

Check = Callable[[], None]
"""Must return quickly. An exception ends the process."""


class _Watchdog:
    """The watchdog of the process; its thread runs while there are checks.

    waits for:    the shortest interval of its checks
    unblocked by: `add`; `remove`
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._checks: dict[object, tuple[Check, float]] = {}
        self._thread: threading.Thread | None = None
        self._running: object | None = None
        """The key of the check that is running."""

    def add(self, key: object, check: Check, every_s: float) -> None:
        with self._changed:
            self._checks[key] = (check, every_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, key: object) -> None:
        """Remove a check. Blocks while the check runs; after the last one, until the thread has ended."""
        with self._changed:
            self._checks.pop(key, None)
            self._changed.notify_all()
            if threading.current_thread() is self._thread:
                return
            self._changed.wait_for(lambda: self._running is not key)
            ended = self._thread if not self._checks else None
            if ended is not None:
                self._thread = None
        if ended is not None:
            ended.join()

    def _watch(self) -> None:
        while (due := self._due()) is not None:
            for key, check in due.items():
                with self._changed:
                    if key not in self._checks:
                        continue
                    self._running = key
                try:
                    _make(check)
                finally:
                    with self._changed:
                        self._running = None
                        self._changed.notify_all()

    def _due(self) -> dict[object, Check] | None:
        """Wait for the interval, or until checks are added or removed, and return the checks; None to end the thread."""
        with self._changed:
            pause_s = min((every_s for _, every_s in self._checks.values()), default=BEAT_S)
            if self._thread is threading.current_thread():
                self._changed.wait(pause_s)
            if self._thread is not threading.current_thread():
                return None
            return {key: check for key, (check, _) in self._checks.items()}


def _make(check: Check) -> None:
    try:
        check()
    except AsyncRLError as error:
        end_process(error)
    except BaseException as error:
        end_process(ServiceStopped(f"the watchdog broke: {type(error).__name__}: {error}"))


_watchdog = _Watchdog()


def _begin_anew() -> None:
    """A fork has no thread of its parent's, and is watched for itself alone."""
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def watched(check: Check, *, every_s: float = BEAT_S) -> Generator[None]:
    """Let the watchdog call `check` while inside. An exception ends the process with its message and exit code."""
    key = object()
    _watchdog.add(key, check, every_s)
    try:
        yield
    finally:
        _watchdog.remove(key)


def end_process(error: AsyncRLError) -> NoReturn:
    """End the process at once, from any thread: print the error to stderr and exit with its code.

    Nothing is drained, because what would drain hangs.
    """
    try:
        print(f"{_program()}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(error.exit_code)


def _program() -> str:
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


# -- event loops --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStall:
    """A blocked event loop."""

    seconds: float
    place: CodeLocation | None
    """The line that blocks; None if unknown."""
    task: asyncio.Task[Any] | None
    """The running task; None for a callback."""
    is_importing: bool
    """Whether a module is being imported."""

    def exceeds(self, limit_s: float) -> bool:
        """Whether the stall is longer than the limit, or five times the limit while a module is imported."""
        return self.seconds >= limit_s * (IMPORTS if self.is_importing else 1)

    def __str__(self) -> str:
        running = f", in {self.task.get_name()!r}" if self.task is not None else ""
        return f"The event loop has been blocked for {self.seconds:.0f} s at {self.place}{running}"


def ends_after(limit_s: float) -> Callable[[LoopStall], None]:
    """An `on_beat` that ends the process (ServiceStopped) once the loop has been blocked for `limit_s`."""

    def judge(stall: LoopStall) -> None:
        if stall.exceeds(limit_s):
            raise ServiceStopped(str(stall))

    return judge


@contextmanager
def stall_watchdog(
    report_after_s: float = REPORT_AFTER_S,
    file: TextIO | None = None,
    *,
    on_stall: Callable[[LoopStall], None] = lambda stall: None,
    on_beat: Callable[[LoopStall], None] = lambda stall: None,
) -> Generator[None]:
    """Watch the running event loop. When it is blocked for `report_after_s`, write all stacks to stderr and call `on_stall`
    once; then call `on_beat` every second. Both run on the watchdog's thread and may block for a while.
    """
    watch = _LoopWatch(report_after_s, file if file is not None else sys.stderr, on_stall, on_beat)
    with watched(watch.check, every_s=min(BEAT_S, report_after_s / 5)):
        yield


class _LoopWatch:
    def __init__(
        self, report_after_s: float, file: TextIO, on_stall: Callable[[LoopStall], None], on_beat: Callable[[LoopStall], None]
    ) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._report_after_s, self._file = report_after_s, file
        self._on_stall, self._on_beat = on_stall, on_beat
        self._turned = threading.Event()
        self._asked_at = time.monotonic()
        self._is_told = False
        self._ask()

    def check(self) -> None:
        seconds = time.monotonic() - self._asked_at
        if self._turned.is_set():
            if self._is_told:
                self._write(f"The event loop runs again after {seconds:.1f} s\n")
            self._is_told = False
            self._ask()
        elif seconds >= self._report_after_s:
            frame = frame_of_thread(self._thread)
            self._see(
                LoopStall(
                    seconds=seconds,
                    place=location_of(frame),
                    task=asyncio.current_task(self._loop),
                    is_importing=is_importing(frame),
                )
            )

    def _see(self, stall: LoopStall) -> None:
        if not self._is_told:
            self._is_told = True
            self._write(f"{stall}; stacks of all threads:\n")
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._on_stall(stall)
        self._on_beat(stall)

    def _ask(self) -> None:
        self._turned.clear()
        self._asked_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._turned.set)
        except RuntimeError:  # the loop was closed
            self._turned.set()

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
