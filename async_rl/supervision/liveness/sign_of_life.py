"""A process shows its supervisor that it lives: a byte a second through an inherited pipe, from the thread that watches it.

    child: watchdog ── a byte a second ──▶ pipe ──▶ supervisor: Child     silent for `silence_s`: killed, and started again

A process that is stopped, or whose interpreter is held by foreign code, cannot report itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

from async_rl.supervision.liveness.watchdog import watched

PIPE = "ASYNC_RL_SIGN_OF_LIFE"
"""The environment variable that tells a child the supervisor's process id and the number of its end of the pipe."""


@contextmanager
def signs_of_life(environment: Mapping[str, str]) -> Generator[None]:
    """Around all that a process does. Without a supervisor that listens it does nothing."""
    parent, _, number = environment.get(PIPE, "").partition(":")
    if parent != str(os.getppid()):  # meant for whoever started this process' parent
        yield
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)

    def beat() -> None:
        with suppress(OSError):  # the supervisor is gone, or reads late
            os.write(pipe, b".")

    beat()
    with watched(beat):
        yield


class Listener:
    """The supervisor's end of one child's pipe. `with` stands around the child's life."""

    def __init__(self, silence_s: float, on_silence: Callable[[], None]) -> None:
        """A child that has never shown a sign of life is not missed: it may be a program that shows none."""
        self._silence_s, self._on_silence = silence_s, on_silence
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._reading, self.number = os.pipe()
        os.set_blocking(self._reading, False)
        self._loop.add_reader(self._reading, self._heard)
        return self

    def __exit__(self, *_problem: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        os.close(self.number)

    @property
    def environment(self) -> dict[str, str]:
        """For the child, which also needs `number` among its open files."""
        return {PIPE: f"{os.getpid()}:{self.number}"}

    def _heard(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._reading, 4096)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._silence_s, self._on_silence)
