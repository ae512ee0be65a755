"""A supervised child process: runs in its own session, is restarted when it crashes, and is killed when its supervisor dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from async_rl.durable.best_effort import explain_write_error
from async_rl.errors import meaning_of
from async_rl.supervision.liveness.sign_of_life import Listener
from async_rl.supervision.processes.process_tree import kill_tree
from async_rl.supervision.processes.restarts import Finish, GiveUp, Restart, RestartPolicy, decide

log = structlog.get_logger("async_rl.supervision")

_PR_SET_PDEATHSIG = 1

PREDECESSOR = "ASYNC_RL_PREDECESSOR"
"""Environment variable of a restarted process: the id of the process that it replaces, which has ended."""


class FatalExit(Exception):
    """A child process ended and will not be restarted."""

    def __init__(self, spec: ChildSpec, *, status: int, how: str, exit_code: int, reason: str) -> None:
        super().__init__(f"{spec.name} {how}, {reason}")
        self.spec = spec
        self.status = status
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None
    """File for its output; None: the terminal."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    inherits: Sequence[int] = ()
    """File descriptors that it inherits under the same numbers."""
    grace_s: float = 60.0
    """Seconds that it may take to end after SIGTERM."""


class Child:
    """A child process. `supervise` runs it; `terminate` sends SIGTERM and stops restarts; `kill` kills its process tree.

    waits for:    the process to end, or `silence_s` without a heartbeat
    unblocked by: exit of the process; `terminate`; `kill`; cancellation
    """

    def __init__(
        self,
        spec: ChildSpec,
        on_start: Callable[[str, int], None],
        on_end: Callable[[str, int, int], None] = lambda name, pid, status: None,
    ) -> None:
        """`on_start` gets its name and process id, `on_end` also its exit code (negative: the signal)."""
        self.spec = spec
        self._on_start, self._on_end = on_start, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._draining = asyncio.Event()
        self._restarts: list[float] = []
        self._was_silent = False
        self._predecessor: dict[str, str] = {}

    async def supervise(self) -> int:
        """Start it, restart it when it crashes, and return its exit code: 0, or any code after `terminate`.

        Raises FatalExit if it is not to be restarted. Cancellation kills the process.
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

    def terminate(self) -> None:
        self._draining.set()
        if self._is_running():
            self._signal_process(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        self._draining.set()
        process, self._process = self._process, None
        if process is None:
            return
        kill_tree(process.pid)

    def last_lines(self, count: int) -> list[str]:
        if self.spec.log is None or not self.spec.log.exists():
            return []
        return self.spec.log.read_text(errors="replace").splitlines()[-count:]

    async def _run_once(self) -> int:
        self._was_silent = False
        with Listener(self.spec.policy.silence_s, self._kill_silent) as listener:
            return await self._run_heard(listener)

    async def _run_heard(self, listener: Listener) -> int:
        output = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env={**self.spec.environment, **self._predecessor, **listener.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(*self.spec.inherits, listener.number),
                start_new_session=True,  # a Ctrl-C on the terminal reaches the supervisor alone
                preexec_fn=self._tie_to_supervisor(),
            )
        finally:
            if output is not None:
                output.close()
        self._on_start(self.spec.name, self._process.pid)
        if self._draining.is_set():  # asked to stop while it was being started
            self._signal_process(signal.SIGTERM)
        self._predecessor = {PREDECESSOR: str(self._process.pid)}
        pid, status = self._process.pid, await self._process.wait()
        self._on_end(self.spec.name, pid, status)
        return status

    def _kill_silent(self) -> None:
        if self._is_running():
            assert self._process is not None
            self._was_silent = True
            kill_tree(self._process.pid)

    def _end(self, status: int) -> str:
        if self._was_silent:
            return f"sent no heartbeat for {self.spec.policy.silence_s:g} s and was killed"
        return how_it_ended(status)

    def _open_log(self) -> IO[bytes] | None:
        if self.spec.log is None:
            return None
        try:
            self.spec.log.parent.mkdir(parents=True, exist_ok=True)
            return self.spec.log.open("ab")
        except OSError as error:
            log.warning(
                f"{explain_write_error(error, self.spec.log)}; the output of {self.spec.name} is lost until its next restart"
            )
            return Path(os.devnull).open("ab")

    def _tie_to_supervisor(self) -> Callable[[], None] | None:
        if sys.platform != "linux":
            return None
        # Loaded here, because little is safe between fork and exec.
        supervisor, libc = os.getpid(), ctypes.CDLL(None)

        def tie() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != supervisor:  # the supervisor died before prctl
                os._exit(1)

        return tie

    async def _drains_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return False
        return True

    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _signal_process(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def how_it_ended(status: int) -> str:
    if status >= 0:
        meaning = meaning_of(status)
        return f"exited with code {status}" + (f" ({meaning})" if meaning else "")
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
