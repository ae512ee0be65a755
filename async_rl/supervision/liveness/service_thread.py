"""A thread that must run as long as its owner. If it ends, the process ends with the thread's name."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Self

from async_rl.errors import ServiceStopped
from async_rl.supervision.liveness.watchdog import end_process


class ServiceThread:
    """Runs `work(thread)` until `stop` is called. If `work` returns or raises before, `on_failure` is called with a
    ServiceStopped; by default it ends the process. What may hang is marked with `working` (work.py).
    """

    def __init__(
        self,
        work: Callable[[ServiceThread], object],
        *,
        name: str,
        on_failure: Callable[[ServiceStopped], object] = end_process,
    ) -> None:
        self.name = name
        self._work, self._on_failure = work, on_failure
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        self._thread.start()
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

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
