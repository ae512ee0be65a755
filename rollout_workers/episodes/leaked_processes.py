"""Kill child processes that episodes started and did not end.

A process does not say which episode started it, but no episode lives longer than its deadline, so an older child belongs
to none. Children of agents (started in `__aenter__`), of the worker itself and of other threads (an engine that
compiles) are spared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from async_rl.supervision import PipedProcess, children_of_this_thread, descendants_of, kill_each
from async_rl.supervision.processes.process_tree import command_of
from rollout_workers.episodes.leaked_tasks import LeakReport


class LeakedProcesses:
    """Make it on the event loop's thread before anything there starts processes; enter it around all episodes."""

    def __init__(self, *, longest_s: float, report: LeakReport) -> None:
        """`longest_s`: upper bound of an episode's life."""
        self._longest_s = longest_s
        self._report = report
        self._preexisting = set(children_of_this_thread())
        self._spared: set[int] = set()
        self._agents: set[int] = set()
        self._first_seen: dict[int, float] = {}
        """When each child was first seen."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill all that is left: no episode runs any more and the agents are closed."""
        self._kill(self._present())

    def spare_children_of(self, agent: object) -> None:
        """Spare the children present when an agent is first used: they may be its own."""
        if id(agent) not in self._agents:
            self._agents.add(id(agent))
            self._spared.update(self._present())

    def sweep(self, now: float) -> None:
        """Kill children older than any episode. Call it regularly."""
        present = [pid for pid in self._present() if pid not in self._spared]
        self._first_seen = {pid: self._first_seen.get(pid, now) for pid in present}
        self._kill([pid for pid in present if now - self._first_seen[pid] > self._longest_s])

    def _present(self) -> list[int]:
        return [pid for pid in children_of_this_thread() if pid not in self._preexisting and pid not in PipedProcess.running]

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._report("", "leaked processes", [command_of(pid)[:200]])
            kill_each([pid, *descendants_of(pid)])
            with suppress(ChildProcessError):  # it was waited for elsewhere
                os.waitpid(pid, 0)
