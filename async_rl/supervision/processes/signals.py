"""SIGTERM and SIGINT: the first asks the process to drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


class Drain(asyncio.Event):
    """Set on the event loop after the first signal; `was_asked` is True from the signal on, even while the loop is blocked."""

    was_asked = False


def drain_on_signals() -> Drain:
    """Return an event that the first signal sets; the next signal ends the process. Call it on the main thread, in its loop.

    The handlers are the interpreter's, not the loop's, and are removed after the first signal, so that the second one ends the
    process even if the loop is blocked.
    """
    loop = asyncio.get_running_loop()
    draining = Drain()
    _wake_on_signals(loop)

    def ask() -> None:
        draining.was_asked = True
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(draining.set)

    _on_first_signal(ask)
    return draining


def drain_flag() -> threading.Event:
    """Like `drain_on_signals` for a main thread without an event loop, which polls the event between units of work."""
    draining = threading.Event()
    _on_first_signal(draining.set)
    return draining


def _wake_on_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Let every signal wake the loop. One that arrives just before the loop sleeps is handled only when the loop wakes."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    loop.add_reader(woken, os.read, woken, 1024)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)


def _on_first_signal(ask: Callable[[], None]) -> None:
    def first(_number: int, _frame: FrameType | None) -> None:
        # Process 1 of a container ignores signals without a handler.
        install(signal.SIG_DFL if os.getpid() > 1 else second)
        ask()

    def second(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    def install(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    install(first)
