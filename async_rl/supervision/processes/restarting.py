"""Something that is started, and started again when it fails: a child process here, or processes on other machines."""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from async_rl.errors import meaning_of
from async_rl.supervision.processes.restarts import Finish, GiveUp, Restart, RestartPolicy, decide

log = structlog.get_logger("async_rl.supervision")


class FatalExit(Exception):
    """A process ended and will not be restarted."""

    def __init__(self, spec: RestartedSpec, *, status: int, how: str, exit_code: int, reason: str) -> None:
        super().__init__(f"{spec.name} {how}, {reason}")
        self.spec = spec
        self.status = status
        self.exit_code = exit_code


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

        Raises FatalExit if it is not to be restarted. Cancellation kills it.
        """
        try:
            while True:
                status = await self._run_once()
                if self._draining.is_set():
                    return status
                decision = decide(status, restarts=self._restarts, now=time.monotonic(), policy=self.spec.policy)
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
                        if await self._drains_within(decision.after_s):
                            return status
                        if decision.counts:
                            self._restarts.append(time.monotonic())
        finally:
            self.kill()

    @abstractmethod
    async def _run_once(self) -> int:
        """Run one attempt to its end and return its exit code, negative for a signal."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end, and restart it no more."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def last_lines(self, count: int) -> list[str]:
        """Return the end of its output, as far as it can be read here."""
        if self.spec.log is None or not self.spec.log.exists():
            return []
        return self.spec.log.read_text(errors="replace").splitlines()[-count:]

    def _end(self, status: int) -> str:
        return how_it_ended(status)

    async def _drains_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return False
        return True


def how_it_ended(status: int) -> str:
    if status >= 0:
        meaning = meaning_of(status)
        return f"exited with code {status}" + (f" ({meaning})" if meaning else "")
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
