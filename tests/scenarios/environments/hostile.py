"""Environments that misbehave in every way we could think of, for a worker that has to live with them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.testing import EchoAgent
from async_rl.types import Rollout, Task

_kept: list[object] = []
"""Processes whose objects are kept, so that Python does not complain that nobody waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile(EchoAgent):
    """Every second task is well; of the others, every sibling does something else that is not."""

    def task(self, index: int) -> Task:
        if index % 32 == 31:
            raise IndexError(f"there is no task {index}")
        return EchoAgent.task(self, index)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        if (misdeed := misdeed_of(task, context)) is not None:
            done = misdeed()
            if asyncio.iscoroutine(done):
                done = await done
            if done is not None:
                return done  # pyright: ignore[reportReturnType]
        return await EchoAgent.rollout(self, task, inference, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(EchoAgent):
    """Well-behaved, but slow where a hostile one hangs; most of the deadline is left for a machine that stands still."""

    deadline_s: float

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        if misdeed_of(task, context) in (hang, swallow_the_deadline):
            await asyncio.sleep(0.1 * self.deadline_s)
        return await EchoAgent.rollout(self, task, inference, context)


def misdeed_of(task: Task, context: EpisodeContext) -> Callable[[], object] | None:
    index = int(task.answer)
    return MISDEEDS[(index // 2 + context.sibling) % len(MISDEEDS)] if index % 2 else None


async def hang() -> None:
    await asyncio.Event().wait()


def fail() -> None:
    raise LookupError("no such square")


def leave() -> None:
    sys.exit(3)


async def cancel_itself() -> None:
    raise asyncio.CancelledError


def return_text() -> str:
    return "a reward of 1, honestly"


async def swallow_the_deadline() -> str:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "as if nothing had happened"
    return ""


def start_processes() -> None:
    _kept.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))


def start_tasks() -> None:
    for _ in range(3):
        _kept.append(asyncio.get_running_loop().create_task(hang()))


def open_files() -> None:
    """And a reference cycle, so that only the garbage collector closes them."""
    reading, writing = socket.socketpair()
    holder: dict[str, object] = {"ends": (reading, writing)}
    holder["itself"] = holder
    raise OSError(f"too many of {os.getpid()}")


MISDEEDS: Sequence[Callable[[], object]] = (
    hang,
    fail,
    leave,
    cancel_itself,
    return_text,
    swallow_the_deadline,
    start_processes,
    start_tasks,
    open_files,
)
