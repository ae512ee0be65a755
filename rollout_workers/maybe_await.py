"""What people write may be a plain function or an async one: both are called alike."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import TypeVar, cast

T = TypeVar("T")


async def result_of(returned: T | Awaitable[T]) -> T:
    """The value itself, awaited if it must be."""
    if inspect.isawaitable(returned):
        return await cast("Awaitable[T]", returned)
    return returned
