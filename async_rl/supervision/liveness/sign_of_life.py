"""Heartbeats of a child process: its watchdog thread writes one byte per second into a pipe inherited from the supervisor.

    child: watchdog ── a byte a second ──▶ pipe ──▶ supervisor: Child     silent for `silence_s`: killed and restarted

This detects a process that is stopped (SIGSTOP) or whose GIL is held by native code.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

from async_rl.supervision.liveness.watchdog import watched

PIPE = "ASYNC_RL_SIGN_OF_LIFE"
"""Environment variable with the supervisor's process id and the descriptor of the child's end of the pipe."""


@contextmanager
def signs_of_life(environment: Mapping[str, str]) -> Generator[None]:
    """Send heartbeats while inside. Does nothing without a listening supervisor."""
    parent, _, number = environment.get(PIPE, "").partition(":")
    if parent != str(os.getppid()):  # inherited from the parent, which was the intended child
        yield
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)

    def beat() -> None:
        with suppress(OSError):  # the supervisor is gone, or the pipe is full
            os.write(pipe, b".")

    beat()
    with watched(beat):
        yield


class Listener:
    """The supervisor's end of a child's pipe; use it as a context manager around the child's life."""

    def __init__(self, silence_s: float, on_silence: Callable[[], None]) -> None:
        """Call `on_silence` after `silence_s` without a heartbeat, but not before the first: a program may send none."""
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
        """Environment variables for the child, which must also inherit descriptor `number`."""
        return {PIPE: f"{os.getpid()}:{self.number}"}

    def _heard(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._reading, 4096)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._silence_s, self._on_silence)
