"""A thread that must run as long as its owner. If it ends or hangs, the process ends with the thread's name."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Self

from async_rl.errors import ServiceStopped
from async_rl.supervision.liveness.watchdog import end_process, watched
from async_rl.supervision.liveness.whereabouts import frame_of_thread, location_of


class ServiceThread:
    """Runs `work(thread)` until `stop` is called. If `work` returns or raises before, or one unit of work exceeds `deadline_s`,
    `on_failure` is called with a ServiceStopped; by default it ends the process.

    Waiting has no deadline. Wrap each unit of work in `with thread.working("the parcel"):`; long work calls `beat`, which
    restarts the deadline.
    """

    def __init__(
        self,
        work: Callable[[ServiceThread], object],
        *,
        name: str,
        deadline_s: float | None = None,
        on_failure: Callable[[ServiceStopped], object] = end_process,
    ) -> None:
        self.name = name
        self._work, self._deadline_s, self._on_failure = work, deadline_s, on_failure
        self._stopping = threading.Event()
        self._busy: tuple[str, float] | None = None
        """Current unit of work and its start time."""
        self._watch = ExitStack()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        self._watch.enter_context(watched(self._check))
        return self

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called; for loops: `while not thread.is_stopping`."""
        return self._stopping.is_set()

    def pause(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns True as soon as `stop` is called."""
        return self._stopping.wait(seconds)

    def stop(self) -> None:
        """Allow the thread to end. The caller must unblock what it waits for."""
        self._stopping.set()
        self._watch.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextmanager
    def working(self, what: str) -> Generator[None]:
        self._busy = (what, time.monotonic())
        try:
            yield
        finally:
            self._busy = None

    def beat(self) -> None:
        if self._busy is not None:
            self._busy = (self._busy[0], time.monotonic())

    def _run(self) -> None:
        reason = "it returned"
        try:
            self._work(self)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            if not self.is_stopping:
                traceback.print_exc()
        if not self.is_stopping:
            self._on_failure(ServiceStopped(f"the thread {self.name!r} must run for as long as its process, but {reason}"))

    def _check(self) -> None:
        if self._deadline_s is None or (busy := self._busy) is None:
            return
        what, since = busy
        if (seconds := time.monotonic() - since) > self._deadline_s:
            self._busy = None
            place = location_of(frame_of_thread(self._thread.ident)) if self._thread.ident is not None else None
            self._on_failure(
                ServiceStopped(
                    f"the thread {self.name!r} has worked on {what} for {seconds:.0f} s without finishing, at {place}"
                )
            )
