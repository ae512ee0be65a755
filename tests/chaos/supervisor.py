"""Runs the plan of a round: kills and pauses processes, corrupts payloads, and restarts dead processes at once.

The plan is timed in acts of the processes, so it means the same on a slow machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from async_rl.errors import FenceLost, RestartLimit, ServerRewound
from tests.chaos.children import POINTS_LOG, ROLES, Child, Children
from tests.chaos.journals import Journal
from tests.chaos.outcome import Death, Outcome
from tests.chaos.plan import Event, Plan
from tests.chaos.poison import poison
from tests.chaos.set_back import cut
from tests.chaos.stage import SERVING, STARTING, config_of

MAX_WRONG_ENDS = 5
"""A role that ends wrongly this often is not restarted."""
STALLED_S = 150.0
"""Without an act for this long, the system hangs."""
LONGEST_EVENT_WAIT_S = 1.0
"""Longest wait for the acts before the next event, which may not come, for example during a wait for a lease."""
DRAIN_S = 150.0
LOOK_AGAIN_S = 0.2
"""Poll interval of the states in shared memory, which give no notification."""


class Supervisor:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self.outcome = Outcome()
        self._children = Children(plan, folder)
        self._journal = Journal(folder / "journals", "supervisor", 0)
        self._down_since: dict[str, float] = {}
        self._wrong_ends: Counter[str] = Counter()
        self._last_act = time.monotonic()
        self._draining = False

    def run(self) -> Outcome:
        """Run until enough kills are done and all roles have drained; the server stays up for the audit."""
        started = time.monotonic()
        for role in ROLES:
            self._start(role)
        try:
            for event in self._plan.events():
                if self.outcome.kills >= self._plan.kills or self.outcome.problems:
                    break
                target = self.outcome.acts + event.after
                self._wait(lambda target=target: self.outcome.acts >= target, LONGEST_EVENT_WAIT_S)
                self._do(event)
            self._drain()
        finally:
            for child in self._children:
                if child.role != "server":
                    self._children.end(child, signal.SIGKILL)
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def close(self) -> None:
        for child in self._children:
            self._children.end(child, signal.SIGTERM)
        self._children.close()

    # -- events of the plan -----------------------------------------------------------------------------------------
    def _do(self, event: Event) -> None:
        child = self._children.current(event.victim)
        if child is None:
            return
        match event.act:
            case "kill_server" if self._children.state(child) == SERVING:
                self._kill_server(child)
            case "kill" | "kill_server" | "set_back":  # a server that is starting dies with its supervising process
                child.killed, child.kept = True, event.kept
                os.kill(child.pid, signal.SIGKILL)
            case "poison":
                self._poison()
            case "pause_learner" | "pause_writer":
                # One that still waits for the lease may get it on resuming, which is right, so it is not paused.
                if child.worked and not child.paused:
                    self._pause(child, event)

    def _kill_server(self, child: Child) -> None:
        self._down_since.setdefault("server", time.monotonic())
        self.outcome.deaths.append(Death(role="server", life=child.life, how="server killed", state=SERVING))
        self._children.set_state(child, "restarting")
        os.kill(child.pid, signal.SIGUSR1)

    def _pause(self, child: Child, event: Event) -> None:
        """Pause a learner past its lease while a successor works, or a writer past its leases."""
        os.kill(child.pid, signal.SIGSTOP)
        self.outcome.pauses += 1
        child.paused, child.lasts = True, event.lasts
        if event.act == "pause_writer":
            child.wakes_at = self.outcome.acts + event.lasts
        else:
            child.replaced = True
            self._start("learner")

    def _poison(self) -> None:
        """Corrupt a ready group's payload: the learner must quarantine it, and its task is rolled again."""
        with contextlib.suppress(RedisError):  # the server is down
            ticket = poison(config_of(self._folder))
            if ticket:
                self._journal.add("poisoned", ticket=ticket)
                self.outcome.poisoned += 1

    # -- starts and deaths -------------------------------------------------------------------------------------------
    def _start(self, role: str) -> None:
        life = self.outcome.lives.get(role, 0)
        self.outcome.lives[role] = life + 1
        self._children.start(role, life)

    def _handle_exit(self, child: Child, code: int) -> None:
        if code == -signal.SIGKILL and child.killed:
            self._died(child, "kill", self._children.state(child))
        elif code == -signal.SIGKILL and child.order:
            self._died(child, "failpoint", self._point_of(child))
        elif code != 0 or not self._draining:
            self._died(child, f"exit {code}", self._children.state(child))
            if not self._is_right(child, code):
                self._wrong_ends[child.role] += 1
                self.outcome.problems.append(f"{child.role} life {child.life} ended with exit code {code}: see its log")
        if child.kept < 1.0:
            gone = cut(config_of(self._folder).redis_folder, child.kept)
            self._journal.add("set_back", kept=child.kept, gone=gone)
            self.outcome.set_backs += 1
        has_finished = self._draining and child.role != "server" and code == 0
        if not (child.replaced or has_finished or self._wrong_ends[child.role] >= MAX_WRONG_ENDS):
            self._down_since.setdefault(child.role, time.monotonic())
            self._start(child.role)

    def _died(self, child: Child, how: str, state: str) -> None:
        self.outcome.deaths.append(Death(role=child.role, life=child.life, how=how, state=state))

    def _point_of(self, child: Child) -> str:
        """Return the failpoint where a process died: its last line in the log."""
        rows = [line.split() for line in (self._folder / POINTS_LOG).read_text().splitlines()]
        return next((name for what, name, pid in reversed(rows) if what == "died" and int(pid) == child.pid), "nowhere")

    def _is_right(self, child: Child, code: int) -> bool:
        """Whether an exit code is expected: a replaced learner loses its fence, a server killed too often is given up."""
        return (
            (child.replaced and code == FenceLost.exit_code)
            or (child.role == "server" and code == RestartLimit.exit_code)
            or (child.role == "learner" and code == ServerRewound.exit_code and self.outcome.set_backs > 0)
        )

    # -- waiting ------------------------------------------------------------------------------------------------------
    def _wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._advance(self._children.wait(min(left, LOOK_AGAIN_S)))
            for child, code in self._children.dead():
                self._handle_exit(child, code)
            self._wake()
            if time.monotonic() - self._last_act > STALLED_S:
                self.outcome.problems.append(f"stalled: nothing was achieved for {STALLED_S:g} s")
                self._last_act = time.monotonic()
        return True

    def _advance(self, slots: bytes) -> None:
        if not slots:
            return
        self._last_act = time.monotonic()
        self.outcome.acts += len(slots)
        for child in self._children:
            if child.slot in slots and not child.replaced:
                child.worked = True
                if child.role == "learner":
                    self._successor_works()
                self._recovered(child.role)

    def _recovered(self, role: str) -> None:
        since = self._down_since.pop(role, None)
        if since is not None:
            self.outcome.recovery_s.setdefault(role.partition("-")[0], []).append(time.monotonic() - since)

    def _successor_works(self) -> None:
        """Let paused learners resume from now on: earlier they would find their lease valid and continue, which is right."""
        for child in self._children:
            if child.replaced and child.wakes_at is None:
                child.wakes_at = self.outcome.acts + child.lasts

    def _wake(self) -> None:
        for child in self._children:
            if child.paused and child.wakes_at is not None and self.outcome.acts >= child.wakes_at:
                child.paused = False
                os.kill(child.pid, signal.SIGCONT)

    # -- the end ------------------------------------------------------------------------------------------------------
    def _drain(self) -> None:
        """Resume paused processes, then drain the writers, then the learner, which saves."""
        if not self._wait(lambda: not any(child.paused for child in self._children), DRAIN_S):
            self.outcome.problems.append(f"paused processes did not resume within {DRAIN_S:g} s")
        self._draining = True
        for prefix in ("writer", "learner"):
            asked: set[int] = set()
            if not self._wait(lambda prefix=prefix, asked=asked: self._has_stopped(prefix, asked), DRAIN_S):
                self.outcome.problems.append(f"{prefix} did not stop within {DRAIN_S:g} s")

    def _has_stopped(self, prefix: str, asked: set[int]) -> bool:
        """Send SIGTERM to each process of a role once, also to restarted ones; whether all have ended."""
        left = [child for child in self._children if child.role.startswith(prefix)]
        for child in left:
            if child.pid not in asked and self._children.state(child) != STARTING:
                asked.add(child.pid)
                os.kill(child.pid, signal.SIGTERM)
        return not left
