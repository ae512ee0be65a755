"""Child processes that episodes started and left behind: nobody else will end them.

A process does not tell which episode it belongs to, but no episode lives longer than its deadline: a child that is older
belongs to none. Those of agents (started in `__aenter__`), of the worker itself and of other threads (an engine that
compiles) are spared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from async_rl.supervision import PipedProcess, children_of_this_thread, descendants_of, kill_each
from rollout_workers.episodes.leaked_tasks import LeakReport


class LeakedProcesses:
    """To be made on the event loop's thread, before whatever may start processes there; `with` stands around all of it."""

    def __init__(self, *, longest_s: float, report: LeakReport) -> None:
        """`longest_s`: no episode lives longer."""
        self._longest_s = longest_s
        self._report = report
        self._preexisting = set(children_of_this_thread())
        self._spared: set[int] = set()
        self._agents: set[int] = set()
        self._first_seen: dict[int, float] = {}
        """When children were seen first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is played any more, and the agents are closed: nobody can own what is left."""
        self._kill(self._present())

    def spare_children_of(self, agent: object) -> None:
        """What is there when an agent is met first may be its own."""
        if id(agent) not in self._agents:
            self._agents.add(id(agent))
            self._spared.update(self._present())

    def sweep(self, now: float) -> None:
        """Ends those that no episode can own any more. Call it every now and then."""
        present = [pid for pid in self._present() if pid not in self._spared]
        self._first_seen = {pid: self._first_seen.get(pid, now) for pid in present}
        self._kill([pid for pid in present if now - self._first_seen[pid] > self._longest_s])

    def _present(self) -> list[int]:
        return [pid for pid in children_of_this_thread() if pid not in self._preexisting and pid not in PipedProcess.running]

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._report("", "processes behind", [_command(pid)])
            kill_each([pid, *descendants_of(pid)])
            with suppress(ChildProcessError):  # somebody else waits for it
                os.waitpid(pid, 0)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "?"
