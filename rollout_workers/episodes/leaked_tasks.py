"""End the asyncio tasks that an episode started and left running.

Each episode runs in a task of its own, and a task factory notes which episode starts which tasks. What several episodes
share, such as a connection with its reader task, is opened in the agent's `__aenter__`, outside of all episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

GRACE_S = 1.0
"""How long tasks may go on after their episode: clients close their connections in tasks of their own."""

END_S = 2.0
"""How long a cancelled task may take to end; after that it is no longer waited for."""

LeakReport = Callable[[str, str, list[str]], None]
"""Called with the environment, the kind of leak, and the names of what an episode leaked."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskOwner:
    """An episode, or other code of an environment, with the tasks it started."""

    environment: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])


_owner: ContextVar[TaskOwner | None] = ContextVar("owner", default=None)
_owners: WeakKeyDictionary[asyncio.Task[Any], TaskOwner] = WeakKeyDictionary()
_report: ContextVar[LeakReport] = ContextVar("report", default=lambda environment, what, names: None)
_uncancellable: set[asyncio.Task[Any]] = set()
"""Tasks that ignore cancellation. They cannot be ended; this reference keeps them from being garbage-collected."""


def environment_of(task: asyncio.Task[Any] | None) -> str:
    """The environment whose code runs in the task; empty for the worker's own tasks. May be called from any thread."""
    owner = _owners.get(task) if task is not None else None
    return owner.environment if owner is not None else ""


@contextmanager
def running_environment(environment: str) -> Generator[None]:
    """Attribute the current task to the environment while inside: it runs its code outside of any episode."""
    task = asyncio.current_task()
    assert task is not None
    _owners[task] = TaskOwner(environment)
    try:
        yield
    finally:
        del _owners[task]


@contextmanager
def track_episode_tasks(report: LeakReport) -> Generator[None]:
    """Record, while inside, which episode starts each task of the running loop. Leaks are passed to `report`."""
    loop = asyncio.get_running_loop()
    factory, token = loop.get_task_factory(), _report.set(report)
    loop.set_task_factory(_start_task)  # pyright: ignore[reportArgumentType]  # loops pass coroutines
    try:
        yield
    finally:
        loop.set_task_factory(factory)
        _report.reset(token)


async def run_episode(episode: Coroutine[Any, Any, T], *, environment: str, name: str) -> T:
    """Run an episode in a task of its own and return its result. Cancelling waits at most END_S for the task to end."""
    owner = TaskOwner(environment)
    with outside_episodes():
        task = asyncio.create_task(_with_its_tasks(episode, owner), name=name)
    _owners[task] = owner
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _end([task], owner)
        raise
    raised, result = task.result()
    if raised is not None:
        raise raised
    return result  # pyright: ignore[reportReturnType]


@contextmanager
def outside_episodes() -> Generator[None]:
    """Tasks started inside belong to the worker, not to an episode."""
    before = _owner.set(None)
    try:
        yield
    finally:
        _owner.reset(before)


async def _with_its_tasks(episode: Coroutine[Any, Any, T], owner: TaskOwner) -> tuple[SystemExit | None, T | None]:
    before = _owner.set(owner)
    try:
        return None, await episode
    except SystemExit as error:  # raised out of a task, it would end the event loop
        return error, None
    finally:
        _owner.reset(before)
        if left := await _unfinished(owner.tasks):
            _report.get()(owner.environment, "leaked tasks", _names(left))
            await _end(left, owner)


async def _unfinished(tasks: Collection[asyncio.Task[Any]]) -> Collection[asyncio.Task[Any]]:
    """Return the tasks still running after GRACE_S; a cancelled episode gets no such grace."""
    task = asyncio.current_task()
    if tasks and task is not None and not task.cancelling():
        with suppress(asyncio.CancelledError):  # a deadline reached now ends the wait only: the episode is over
            await asyncio.wait(list(tasks), timeout=GRACE_S)
    return list(tasks)


def _start_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    if (owner := _owner.get()) is not None and not task.done():
        _owners[task] = owner
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task


async def _end(tasks: Iterable[asyncio.Task[Any]], owner: TaskOwner) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    done, uncancellable = await asyncio.wait(left, timeout=END_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    if uncancellable:
        _report.get()(owner.environment, "tasks that ignore cancellation", _names(uncancellable))
        _uncancellable.update(uncancellable)
        for task in uncancellable:
            task.add_done_callback(_uncancellable.discard)


def _names(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Each name once: their number differs between episodes with the same mistake."""
    return sorted({getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks})
