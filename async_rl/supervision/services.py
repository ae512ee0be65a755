"""Runs services (endless tasks) beside a finite task in one process, so that no failure is lost and no task outlives its
parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from async_rl.errors import ServiceStopped

ResultT = TypeVar("ResultT")
Run = Callable[[], Awaitable[object]]


async def run_with(main: Callable[[], Awaitable[ResultT]], **services: Run) -> ResultT:
    """Run `main` beside the services and return its result.

    When `main` ends, the services are cancelled. If a service fails or ends first, `main` is cancelled and the cause is raised
    in an exception group.
    """
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(forever(name, run), name=name) for name, run in services.items()]
        result = await main()
        for task in beside:
            task.cancel()
    return result


async def forever(name: str, run: Run) -> NoReturn:
    """Run a service. Raises ServiceStopped if it returns."""
    await run()
    raise ServiceStopped(f"the service {name!r} ended although it should run for as long as its process")
