"""Call functions that users wrote, which may be plain or async."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

from async_rl.supervision.liveness.daemon_thread import in_daemon_thread

T = TypeVar("T")


async def awaited(returned: T | Awaitable[T]) -> T:
    """Return the value itself, awaiting it first if it is awaitable."""
    if inspect.isawaitable(returned):
        return await cast("Awaitable[T]", returned)
    return returned


async def call_user_function(function: Callable[..., T | Awaitable[T]], *args: object, **named: object) -> T:
    """Call an async function on the event loop, and a plain one on a thread, where it may block."""
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[T]", function(*args, **named))
    return await awaited(await in_daemon_thread(partial(function, *args, **named), name="plain function"))
