"""The processes of a round, forked from one that has imported everything, so that a restart takes milliseconds.

A child reports its acts through a pipe and its state in memory that it shares with the parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from mmap import mmap
from pathlib import Path
from typing import NoReturn

from async_rl.durable import failpoints
from async_rl.errors import AsyncRLError, find_async_rl_error
from tests.chaos.journals import Journal
from tests.chaos.learner_role import learn
from tests.chaos.plan import WRITERS, Plan
from tests.chaos.server_role import keep_server
from tests.chaos.stage import STARTING, STATE_BYTES, Stage
from tests.chaos.writer_role import write

POINTS_LOG = "points.log"
SLOTS = 128
"""Assigned in turn, so that the last report of a dead process is not taken for one of its successor."""

ROLES = {"server": keep_server, "learner": learn, **{f"writer-{number}": write for number in range(WRITERS)}}
POINTS = {
    "learner": "learner whole_file acquire recover settle recovered issue publish release take position checkpoint hold "
    "refuse resign",
    "writer": "writer reserve renew commit drop quarantine",
}
"""First words of a role's failpoints: its own name, and the scripts that it runs."""


@dataclass(slots=True, kw_only=True)
class Child:
    role: str
    life: int
    slot: int
    pid: int
    order: str
    """Failpoints at which it dies by itself."""
    worked: bool = False
    """Whether it has reported an act."""
    killed: bool = False
    kept: float = 1.0
    """Part of a server's data that is kept when it is restarted."""
    paused: bool = False
    lasts: int = 0
    wakes_at: int | None = None
    """Number of acts at which it is resumed; a learner's count begins when its successor works."""
    replaced: bool = False
    """Whether another process took over its role while it was paused."""


def points_of(role: str) -> list[str]:
    """Return the failpoints of a role."""
    words = POINTS.get(role.partition("-")[0], "").split()
    return sorted(name for name in failpoints.known() if name.partition(".")[0] in words)


class Children:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._alive: dict[int, Child] = {}
        self._slots = cycle(range(SLOTS))
        self._states = mmap(-1, SLOTS * STATE_BYTES)
        self._progress, self._progress_end = os.pipe()
        self._woken, self._woken_end = os.pipe()
        for end in (self._progress, self._woken, self._woken_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken_end, warn_on_full_buffer=False)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._progress, self._progress_end, self._woken, self._woken_end):
            os.close(end)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._alive.values()))

    def current(self, role: str) -> Child | None:
        return next((child for child in self if child.role == role and not child.replaced), None)

    def start(self, role: str, life: int) -> None:
        order = self._plan.order(role, life, points_of(role))
        taken = {child.slot for child in self}
        slot = next(slot for slot in self._slots if slot not in taken)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._become(role, life, slot, order)
        self._alive[pid] = Child(role=role, life=life, slot=slot, pid=pid, order=order)

    def wait(self, timeout_s: float) -> bytes:
        """Wait until a process acts or dies; return the slots of those that acted."""
        ready, _, _ = select.select([self._progress, self._woken], [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        return os.read(self._progress, 4096) if self._progress in ready else b""

    def dead(self) -> Iterator[tuple[Child, int]]:
        """Yield the processes that died since the last call, with their exit codes."""
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._alive.pop(pid)
            yield child, os.waitstatus_to_exitcode(status)
            self.set_state(child, "")

    def end(self, child: Child, number: signal.Signals) -> None:
        """Signal a process and wait for its end."""
        os.kill(child.pid, number)
        os.waitpid(child.pid, 0)
        del self._alive[child.pid]

    def state(self, child: Child) -> str:
        start = child.slot * STATE_BYTES
        return self._states[start : start + STATE_BYTES].strip(b"\0 ").decode() or STARTING

    def set_state(self, child: Child, state: str) -> None:
        start = child.slot * STATE_BYTES
        self._states[start : start + STATE_BYTES] = state.encode().ljust(STATE_BYTES)

    def _become(self, role: str, life: int, slot: int, order: str) -> NoReturn:
        """In the child: run the role; never returns."""
        code = AsyncRLError.exit_code
        try:
            self._leave_the_parent(role, life)
            failpoints.arm(order, self._folder / POINTS_LOG)
            stage = Stage(
                plan=self._plan,
                folder=self._folder,
                role=role,
                slot=slot,
                life=life,
                states=self._states,
                progress=self._progress_end,
                journal=Journal(self._folder / "journals", role, life),
            )
            asyncio.run(ROLES[role](stage))
            code = 0
        except BaseException as error:
            ours = find_async_rl_error(error)
            code = ours.exit_code if ours is not None else AsyncRLError.exit_code
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _leave_the_parent(self, role: str, life: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if sys.platform == "linux":  # children end with the harness
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        for end in (self._progress, self._woken, self._woken_end):
            os.close(end)
        (self._folder / "logs").mkdir(exist_ok=True)
        with (self._folder / "logs" / f"{role}.{life:04d}.log").open("ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
