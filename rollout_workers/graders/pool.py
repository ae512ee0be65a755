"""The worker's side: a pool of grader processes, started on demand and replaced after a failure.

in_process(grade, ...) ─▶ a free process ─▶ "ready" (the function is imported) ─▶ result ─▶ free again
                             └ timed out, died, cancelled, leaked processes: killed with its descendants
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from async_rl.supervision import PipedProcess, ProcessEnded
from rollout_workers.episodes.leaked_tasks import outside_episodes
from rollout_workers.episodes.rewards import Score

READY_S = 300.0
"""Time limit for starting Python and importing the grader's module."""
TIMEOUT_S = 30.0

Grader = Callable[..., Any] | str
"""A function on the top level of a module, or its name as `module:function` or `path/to/file.py:function`."""


class GraderRaised(Exception):
    """The function raised."""


class GraderTimeout(Exception):
    """It returned nothing in time; its process was killed."""


class GraderDied(Exception):
    """Its process ended during the call."""


async def in_process(grader: Grader, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Call a blocking function in a grader process, and return what it returns: a plain value, or a Score.

    It runs on the main thread of the process, one call at a time. `timeout_s` counts from when its module was imported.
    Cancelling this call, as the end of an episode does, kills the process.
    """
    pool = _pool.get()
    if pool is None:
        raise RuntimeError("there are no grader processes here: play the episode inside `async with open_graders():`")
    return await pool.call(reference_of(grader), arguments, timeout_s)


@asynccontextmanager
async def open_graders(processes: int = 2) -> AsyncGenerator[GraderPool]:
    """Let `in_process` use up to this many grader processes inside; all are ended on leaving."""
    pool = GraderPool(processes)
    before = _pool.set(pool)
    try:
        yield pool
    finally:
        _pool.reset(before)
        await pool.close()


class GraderPool:
    def __init__(self, processes: int) -> None:
        self._places = asyncio.Semaphore(processes)
        self._free: list[PipedProcess] = []
        self._is_closed = False
        self.killed = 0
        """Number of processes killed so far."""

    async def call(self, reference: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        async with self._places:
            with outside_episodes():
                process = self._free.pop() if self._free else await PipedProcess.start("rollout_workers.graders.process")
            is_reusable = False
            try:
                answer = await _ask(process, reference, arguments, timeout_s)
                is_reusable = not answer["left_behind"]
            finally:
                if is_reusable and not self._is_closed:
                    self._free.append(process)
                else:
                    self.killed += 1
                    await process.kill()
        if "error" in answer:
            raise GraderRaised(answer["error"])
        return Score(**answer["score"]) if "score" in answer else answer["result"]

    async def close(self) -> None:
        self._is_closed = True
        while self._free:
            await self._free.pop().kill()


def reference_of(grader: Grader) -> str:
    """The name by which another process imports the function. Raises TypeError if it cannot be imported."""
    if isinstance(grader, str):
        return grader
    name, module = getattr(grader, "__qualname__", ""), sys.modules.get(getattr(grader, "__module__", ""))
    if module is None or functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), module) is not grader:
        raise TypeError(f"{grader!r} cannot be found by another process: a grader is a function on the top level of a module")
    # A file loaded by its path has a module name that only this process knows.
    return f"{module.__name__ if '.' in module.__name__ else module.__file__}:{name}"


async def _ask(process: PipedProcess, reference: str, arguments: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
    limit_s = READY_S
    try:
        await process.send({"function": reference, "arguments": arguments, "path": sys.path})
        async with asyncio.timeout(limit_s):
            answer = await process.receive()
        if answer == "ready":
            limit_s = timeout_s
            async with asyncio.timeout(limit_s):
                answer = await process.receive()
        return answer
    except ProcessEnded as ended:
        raise GraderDied(f"{reference}: its process {ended}") from ended
    except TimeoutError as error:
        raise GraderTimeout(f"{reference} gave no answer within {limit_s:g} s; its process was killed") from error


_pool: ContextVar[GraderPool | None] = ContextVar("graders", default=None)
