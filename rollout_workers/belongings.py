"""An episode runs in a task of its own, and the tasks that it starts end with it, whether or not its author thought of that.

What several episodes share (a connection with a reader of its own, say) is opened in the agent's `__aenter__`, which is outside
of all episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 2.0
"""What is cancelled has this long to end; then it is left to itself."""

Report = Callable[[str, list[str]], None]
"""Hears what an episode did not end by itself, and the names of the coroutines."""

_owner: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("owner", default=None)
_report: ContextVar[Report] = ContextVar("report", default=lambda what, names: None)
_left_to_themselves: set[asyncio.Task[Any]] = set()
"""Tasks that ignore being cancelled. Nobody can end them; here they are at least not collected while they run."""


@contextmanager
def tasks_have_owners(report: Report) -> Generator[None]:
    """While inside, every task of the running loop is noted with the episode that starts it."""
    loop = asyncio.get_running_loop()
    factory, told = loop.get_task_factory(), _report.set(report)
    loop.set_task_factory(_note)  # pyright: ignore[reportArgumentType]  # loops pass coroutines
    try:
        yield
    finally:
        loop.set_task_factory(factory)
        _report.reset(told)


async def run_episode(episode: Coroutine[Any, Any, T], *, name: str) -> T:
    """Its result. Cancelling this cancels it, and waits no longer than END_S for it to obey."""
    with nobodys_tasks():
        task = asyncio.create_task(_with_its_tasks(episode), name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _end([task])
        raise
    raised, result = task.result()
    if raised is not None:
        raise raised
    return result  # pyright: ignore[reportReturnType]


@contextmanager
def nobodys_tasks() -> Generator[None]:
    """What is started inside belongs to no episode: it is ours."""
    before = _owner.set(None)
    try:
        yield
    finally:
        _owner.reset(before)


async def _with_its_tasks(episode: Coroutine[Any, Any, T]) -> tuple[SystemExit | None, T | None]:
    mine: set[asyncio.Task[Any]] = set()
    before = _owner.set(mine)
    try:
        return None, await episode
    except SystemExit as error:  # out of a task it would end the event loop
        return error, None
    finally:
        _owner.reset(before)
        if mine:
            _report.get()("tasks behind", _names(mine))
            await _end(mine)


def _note(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    if (owner := _owner.get()) is not None and not task.done():
        owner.add(task)
        task.add_done_callback(owner.discard)
    return task


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    done, stubborn = await asyncio.wait(left, timeout=END_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not print it
    if stubborn:
        _report.get()("tasks that ignore being cancelled", _names(stubborn))
        _left_to_themselves.update(stubborn)
        for task in stubborn:
            task.add_done_callback(_left_to_themselves.discard)


def _names(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    return sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks)
