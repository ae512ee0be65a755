"""Runs blocking code that may never return beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Like asyncio.to_thread, but a thread that hangs neither blocks a pool nor keeps the process from ending.

    Cancellation abandons the thread, which cannot be stopped.
    """
    return await asyncio.wrap_future(start_daemon_thread(function, name=name))


def start_daemon_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Begin `function` on a daemon thread, in a copy of this context."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from here on cancelling a wait does not cancel the future the thread answers
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(function))
        except BaseException as raised:
            answer.set_exception(as_exception(raised))

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def as_exception(raised: BaseException) -> Exception:
    """Wrap what a future cannot carry: StopIteration, and SystemExit, which would end the event loop."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error
