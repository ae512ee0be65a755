"""SIGTERM and Ctrl-C: the first asks the process to drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


class Drain(asyncio.Event):
    """Set by the loop once it turns; `was_asked` is true from the signal on, also while the loop stands still."""

    was_asked = False


def drain_on_signals() -> Drain:
    """An event that the first signal sets; the next signal ends the process. For the main thread, inside its loop.

    The handlers are the interpreter's rather than the loop's, and are gone after the first signal: so the second one ends
    a process whatever it is stuck in.
    """
    loop = asyncio.get_running_loop()
    draining = Drain()

    def ask() -> None:
        draining.was_asked = True
        with suppress(RuntimeError):  # the loop has ended, and with it what could be drained
            loop.call_soon_threadsafe(draining.set)

    _on_first_signal(ask)
    return draining


def drain_flag() -> threading.Event:
    """The same for a main thread without a loop, which looks at the event where it can stop."""
    draining = threading.Event()
    _on_first_signal(draining.set)
    return draining


def _on_first_signal(ask: Callable[[], None]) -> None:
    def first(_number: int, _frame: FrameType | None) -> None:
        # A container's first process is shielded from the signals that it does not handle.
        install(signal.SIG_DFL if os.getpid() > 1 else second)
        ask()

    def second(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    def install(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    install(first)
