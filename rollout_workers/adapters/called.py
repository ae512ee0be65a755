"""Calling what people wrote: an async function here, a plain one on a thread, where it may block."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from rollout_workers.maybe_await import result_of

T = TypeVar("T")


async def called(function: Callable[..., T | Awaitable[T]], *args: object, **named: object) -> T:
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[T]", function(*args, **named))
    return await result_of(await in_daemon_thread(partial(function, *args, **named), name="plain function"))
