"""Deadlines for blocking work: what hangs in a collective, a CUDA call or a file ends its process with its name.

    thread:  with working("a training step"): ...        any thread, any module
    main():  with work_limit(config.supervision.work_limit_s): ...

Without `work_limit` nothing has a deadline.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from async_rl.errors import ServiceStopped
from async_rl.supervision.liveness.watchdog import BEAT_S, watched
from async_rl.supervision.liveness.whereabouts import frame_of_thread, location_of

FIRST = 5
"""The first work of a kind in a process gets so many limits: it compiles kernels, loads libraries, fills caches."""

_LONGEST_PAUSE_S = 2 * BEAT_S
"""The most that the time between two checks counts. It is longer only if the process did not run, for example because the
machine was suspended, and then the work did not run either."""


@dataclass(slots=True)
class _Work:
    what: str
    thread: str
    seconds: float = 0.0


_running: dict[int, _Work] = {}
"""By thread. Each thread changes its own entry only."""
_done: set[str] = set()
"""The kinds of work that were finished once."""


@contextmanager
def working(what: str) -> Generator[None]:
    """Mark blocking work on this thread. `what` is its kind, for example "a training step", and not its number.

    Do not wait for other processes' data inside that may rightly take forever. Inner work replaces the outer until it ends.
    """
    ident = threading.get_ident()
    outer = _running.get(ident)
    _running[ident] = _Work(what, threading.current_thread().name)
    try:
        yield
    finally:
        if outer is not None:
            _running[ident] = outer
        else:
            del _running[ident]
    _done.add(what)


@contextmanager
def work_limit(limit_s: float) -> Generator[None]:
    """Watch the work of all threads while inside. What takes longer than `limit_s` ends the process (ServiceStopped), after all
    stacks were written to stderr. 0: no limit.
    """
    if limit_s == 0:
        yield
        return
    checked_at = time.monotonic()

    def check() -> None:
        nonlocal checked_at
        now = time.monotonic()
        elapsed, checked_at = min(now - checked_at, _LONGEST_PAUSE_S), now
        for ident, work in _running.copy().items():
            work.seconds += elapsed
            if work.seconds >= limit_s * (1 if work.what in _done else FIRST):
                _end(ident, work)

    with watched(check, every_s=min(BEAT_S, limit_s / 5)):
        yield


def _end(ident: int, work: _Work) -> None:
    place = location_of(frame_of_thread(ident))
    with suppress(Exception):  # stderr may be no file, and the error below matters more
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    raise ServiceStopped(
        f"the thread {work.thread!r} has worked on {work.what} for {work.seconds:.0f} s without finishing, at {place} "
        "(supervision.work_limit_s)"
    )
