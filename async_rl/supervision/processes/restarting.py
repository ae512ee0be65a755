"""Something that is started, and started again when it fails: a child process here, or processes on other machines."""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from async_rl.errors import RestartLimit, meaning_of
from async_rl.supervision.processes.restarts import Finish, GiveUp, Restart, RestartPolicy, decide

log = structlog.get_logger("async_rl.supervision")


class FatalExit(Exception):
    """A process ended and will not be restarted."""

    def __init__(self, spec: RestartedSpec, *, status: int, how: str, exit_code: int, reason: str) -> None:
        super().__init__(f"{spec.name} {how}, {reason}")
        self.spec = spec
        self.status = status
        self.exit_code = exit_code

    @property
    def is_tried_again(self) -> bool:
        """Whether it may end otherwise after a while, if its run goes on without it."""
        return self.exit_code == RestartLimit.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedSpec:
    name: str
    log: Path | None
    """File for its output; None: the terminal."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    grace_s: float = 60.0
    """Seconds that it may take to end after it was asked to."""


class Restarted(ABC):
    """Runs something again and again, as its policy says. `supervise` runs it; `terminate` asks it to end; `kill` ends it.

    waits for:    the end of each attempt
    unblocked by: its end; `terminate`; `kill`; cancellation
    """

    def __init__(self, spec: RestartedSpec) -> None:
        self.spec = spec
        self._draining = asyncio.Event()
        self._restarts: list[float] = []

    async def supervise(self) -> int:
        """Start it, restart it when it crashes, and return its exit code: 0, or any code after `terminate`.

        Raises FatalExit if it is not to be restarted. Cancellation kills it first.
        """
        try:
            while not self._draining.is_set():
                status = await self._run_once()
                if self._draining.is_set():
                    return status
                now, is_lost = time.monotonic(), self._has_lost_machine()
                decision = decide(status, restarts=self._restarts, now=now, policy=self.spec.policy, lost_machine=is_lost)
                match decision:
                    case Finish():
                        return status
                    case GiveUp():
                        raise FatalExit(
                            self.spec,
                            status=status,
                            how=self._end(status),
                            exit_code=decision.exit_code,
                            reason=decision.reason,
                        )
                    case Restart():
                        log.warning(f"{self.spec.name} {self._end(status)}; restarting in {decision.after_s:g} s")
                        if await self.drains_within(decision.after_s):
                            return status
                        if decision.counts:
                            self._restarts.append(time.monotonic())
            return 0
        finally:
            self._kill()

    def terminate(self) -> None:
        """Ask it to end, and restart it no more. May be repeated: it is asked once, because a second SIGTERM would end it
        before it has drained."""
        if not self._draining.is_set():
            self._draining.set()
            self._ask_to_end()

    def kill(self) -> None:
        """End it at once, and restart it no more."""
        self._draining.set()
        self._kill()

    @abstractmethod
    async def _run_once(self) -> int:
        """Run one attempt to its end and return its exit code, negative for a signal."""

    @abstractmethod
    def _ask_to_end(self) -> None:
        """Let the attempt that runs drain."""

    @abstractmethod
    def _kill(self) -> None:
        """End the attempt that runs, and all that it started."""

    def last_lines(self, count: int) -> list[str]:
        """Return the end of its output, as far as it can be read here."""
        if self.spec.log is None or not self.spec.log.exists():
            return []
        return self.spec.log.read_text(errors="replace").splitlines()[-count:]

    async def drains_within(self, seconds: float | None) -> bool:
        """Wait until it is asked to end. False: it was not, within that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        return self._draining.is_set()

    def _end(self, status: int) -> str:
        return how_it_ended(status)

    def _has_lost_machine(self) -> bool:
        """Whether the last attempt ended because its machine was lost, which is no crash."""
        return False


def exit_code_of(status: int) -> int:
    """128 + N for signal N; 0 for our own SIGTERM, which ends a process before it has a handler."""
    code = status if status >= 0 else 128 - status
    return 0 if code == 128 + signal.SIGTERM else code


def how_it_ended(status: int) -> str:
    if status >= 0:
        meaning = meaning_of(status)
        return f"exited with code {status}" + (f" ({meaning})" if meaning else "")
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
