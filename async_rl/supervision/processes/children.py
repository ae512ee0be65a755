"""A supervised child process: runs in its own session, is restarted when it crashes, and is killed when its supervisor dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from async_rl.durable.best_effort import explain_write_error
from async_rl.supervision.liveness.sign_of_life import Listener
from async_rl.supervision.processes.process_tree import kill_tree
from async_rl.supervision.processes.restarting import Restarted, RestartedSpec

log = structlog.get_logger("async_rl.supervision")

_PR_SET_PDEATHSIG = 1
KILLED_WITHIN_S = 10.0
"""Time for a killed process to be gone. The kernel may keep one longer, as in a call of a GPU's driver."""
PREDECESSOR = "ASYNC_RL_PREDECESSOR"
"""Environment variable of a restarted process: the id of the process that it replaces, which has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec(RestartedSpec):
    command: Sequence[str]
    environment: Mapping[str, str]
    inherits: Sequence[int] = ()
    """File descriptors that it inherits under the same numbers."""


class Child(Restarted):
    """A child process. `terminate` sends it SIGTERM, once; `kill` kills its process tree.

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
        super().__init__(spec)
        self._own = spec
        self._on_start, self._on_end = on_start, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._was_silent = False
        self._predecessor: dict[str, str] = {}

    def _ask_to_end(self) -> None:
        if self._is_running():
            self._signal_process(signal.SIGTERM)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        kill_tree(process.pid)

    async def _run_once(self) -> int:
        self._was_silent = False
        with Listener(self.spec.policy.silence_s, self._kill_silent) as listener:
            return await self._run_heard(listener)

    async def _run_heard(self, listener: Listener) -> int:
        output = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._own.command,
                env={**self._own.environment, **self._predecessor, **listener.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(*self._own.inherits, listener.number),
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
        return await self._wait(self._process)

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            self._kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILLED_WITHIN_S)
            raise
        self._on_end(self.spec.name, process.pid, status)
        return status

    def _kill_silent(self) -> None:
        if self._is_running():
            assert self._process is not None
            self._was_silent = True
            kill_tree(self._process.pid)

    def _end(self, status: int) -> str:
        if self._was_silent:
            return f"sent no heartbeat for {self.spec.policy.silence_s:g} s and was killed"
        return super()._end(status)

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

    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _signal_process(self, number: signal.Signals) -> None:
        assert self._process is not None
        # Before Python 3.13.2 its own `send_signal` may take the exit code of one that has just ended away from asyncio.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
