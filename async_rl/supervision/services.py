"""Services beside a finite piece of work, inside one process: no failure is lost and nothing outlives its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from async_rl.errors import ServiceStopped

ResultT = TypeVar("ResultT")
Run = Callable[[], Awaitable[object]]


async def run_with(main: Callable[[], Awaitable[ResultT]], **services: Run) -> ResultT:
    """The result of `main`, while the services run beside it.

    When `main` ends, the services are cancelled. A service that fails or ends first is a failure: `main` is cancelled
    and the cause raised, in an exception group.
    """
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(forever(name, run), name=name) for name, run in services.items()]
        result = await main()
        for task in beside:
            task.cancel()
    return result


async def forever(name: str, run: Run) -> NoReturn:
    """A service may only end by being cancelled or by raising."""
    await run()
    raise ServiceStopped(f"the service {name!r} ended although it should run for as long as its process")
