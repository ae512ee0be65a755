"""An episode runs in a task of its own, and the tasks that it starts end with it, whether or not its author thought of that.

What several episodes share (a connection with a reader of its own, say) is opened in the agent's `__aenter__`, which is outside
of all episodes.
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
"""What still runs when an episode has ended may end by itself within this: a client that closes its connection does so in a
task of its own."""

END_S = 2.0
"""What is cancelled has this long to end; then it is left to itself."""

LeakReport = Callable[[str, str, list[str]], None]
"""Called with the environment, what an episode did not end by itself, and the names of the coroutines."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskOwner:
    """The owner of tasks."""

    environment: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])


_owner: ContextVar[TaskOwner | None] = ContextVar("owner", default=None)
_owners: WeakKeyDictionary[asyncio.Task[Any], TaskOwner] = WeakKeyDictionary()
_report: ContextVar[LeakReport] = ContextVar("report", default=lambda environment, what, names: None)
_uncancellable: set[asyncio.Task[Any]] = set()
"""Tasks that ignore being cancelled. Nothing can end them; here they are at least not collected while they run."""


def environment_of(task: asyncio.Task[Any] | None) -> str:
    """Whose code runs in the task, also when asked from another thread; empty for a task of ours."""
    owner = _owners.get(task) if task is not None else None
    return owner.environment if owner is not None else ""


@contextmanager
def running_environment(environment: str) -> Generator[None]:
    """The current task runs code of the environment for a while, outside of any episode."""
    task = asyncio.current_task()
    assert task is not None
    _owners[task] = TaskOwner(environment)
    try:
        yield
    finally:
        del _owners[task]


@contextmanager
def track_episode_tasks(report: LeakReport) -> Generator[None]:
    """While inside, every task of the running loop is noted with the episode that starts it."""
    loop = asyncio.get_running_loop()
    factory, told = loop.get_task_factory(), _report.set(report)
    loop.set_task_factory(_start_task)  # pyright: ignore[reportArgumentType]  # loops pass coroutines
    try:
        yield
    finally:
        loop.set_task_factory(factory)
        _report.reset(told)


async def run_episode(episode: Coroutine[Any, Any, T], *, environment: str, name: str) -> T:
    """Its result. Cancelling this cancels it, and waits no longer than END_S for it to obey."""
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
    """What is started inside belongs to no episode: it is ours."""
    before = _owner.set(None)
    try:
        yield
    finally:
        _owner.reset(before)


async def _with_its_tasks(episode: Coroutine[Any, Any, T], owner: TaskOwner) -> tuple[SystemExit | None, T | None]:
    before = _owner.set(owner)
    try:
        return None, await episode
    except SystemExit as error:  # out of a task it would end the event loop
        return error, None
    finally:
        _owner.reset(before)
        if left := await _unfinished(owner.tasks):
            _report.get()(owner.environment, "tasks behind", _names(left))
            await _end(left, owner)


async def _unfinished(tasks: Collection[asyncio.Task[Any]]) -> Collection[asyncio.Task[Any]]:
    """Those that have not ended after the grace, which an episode that is cancelled does not get."""
    task = asyncio.current_task()
    if tasks and task is not None and not task.cancelling():
        with suppress(asyncio.CancelledError):  # a deadline that comes now ends the grace, and no episode: this one is over
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
            task.exception()  # looked at, so that asyncio does not print it
    if uncancellable:
        _report.get()(owner.environment, "tasks that ignore being cancelled", _names(uncancellable))
        _uncancellable.update(uncancellable)
        for task in uncancellable:
            task.add_done_callback(_uncancellable.discard)


def _names(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Each once: how many there are differs between episodes of one mistake."""
    return sorted({getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks})
