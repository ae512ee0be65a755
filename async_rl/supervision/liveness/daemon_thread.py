"""Runs blocking code that may never return beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Like asyncio.to_thread, but a thread that hangs neither blocks a pool nor keeps the process from ending.

    Cancellation abandons the thread, which cannot be stopped.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = as_exception(raised)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer


def as_exception(raised: BaseException) -> Exception:
    """Wrap what a future cannot carry: StopIteration, and SystemExit, which would end the event loop."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error
