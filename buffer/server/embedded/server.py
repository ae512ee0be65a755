"""The private Redis of a run: started, restarted after crashes, and stopped with the process that started it.

It listens on a Unix socket only, in a folder that only this user may enter, and persists to an append-only file.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from async_rl.config import Config
from async_rl.durable.best_effort import report_write_error
from async_rl.durable.file_lock import try_lock
from async_rl.durable.whole_file import write_whole
from async_rl.errors import ConfigError, RestartLimit
from buffer.server.addresses import parse_address
from buffer.server.client import Server
from buffer.server.embedded.fsync_service import sync_files
from buffer.server.embedded.programs import damaged_file, find_binary, repair_command, server_command
from buffer.server.embedded.socket_folder import socket_folder

MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""After more than MAX_RESTARTS crashes within this time the server is not restarted again."""
STOP_TIMEOUT_S = 20.0
PREDECESSOR_S = 5.0
ORPHAN_S = 60.0
"""How long to wait for another server of the folder to end: it may just be ending; without its supervisor it certainly is."""

log = logging.getLogger(__name__)


class EmbeddedServer:
    """`async with EmbeddedServer(config)`: inside, Redis answers at `config.redis_url`. Raises RestartLimit."""

    def __init__(self, config: Config) -> None:
        if config.redis.url:
            shown = parse_address(config.redis.url).shown
            raise ConfigError(f"redis.url is {shown!r}, so there is no server to start; leave it empty to have one")
        self._config = config
        self._folder = config.redis_folder
        self._socket = Path(urlsplit(config.redis_url).path)
        self._binary = _binary_for(self._folder)
        self._command = server_command(self._binary, self._folder, self._socket, config.redis.max_memory_mb)
        self._restarts: deque[float] = deque()
        self._lock: int
        self._log_begins: int
        self._process: asyncio.subprocess.Process
        self._closing: contextlib.AsyncExitStack

    @property
    def pid(self) -> int:
        return self._process.pid

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as opening:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = await _lock(self._folder)
            opening.callback(os.close, self._lock)
            opening.enter_context(socket_folder(self._socket.parent))
            await self._start()
            opening.push_async_callback(self._stop)
            tasks = await opening.enter_async_context(asyncio.TaskGroup())
            opening.callback(tasks.create_task(self._keep_alive(), name="embedded redis").cancel)
            opening.callback(tasks.create_task(sync_files(self._folder), name="flush the data").cancel)
            self._closing = opening.pop_all()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._closing.__aexit__(*problem)

    async def _start(self) -> None:
        """Start the process and wait until it has read its data and answers."""
        _delete_leftovers(self._folder)
        self._socket.unlink(missing_ok=True)
        with self._log_file.open("ab") as output:
            self._log_begins = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._lock,),  # the data folder stays locked until this very process is gone
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
                preexec_fn=_die_with_parent,
            )
        try:
            await self._wait_until_ready()
        except BaseException:
            await self._stop()
            raise

    async def _wait_until_ready(self) -> None:
        server = Server(self._config.redis_url, patience_s=self._config.redis.connect_timeout_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._fail_if_it_ends())
                await server.ping()
                watch.cancel()
        except* RestartLimit as found:
            raise found.exceptions[0] from None
        finally:
            await server.close()

    async def _fail_if_it_ends(self) -> None:
        code = await self._process.wait()
        with self._log_file.open("rb") as log_file:
            log_file.seek(self._log_begins)
            damaged = damaged_file(log_file.read().decode(errors="replace"), self._folder)
        if damaged is not None:
            raise RestartLimit(
                f"the data of the embedded Redis are damaged: {damaged} cannot be read to its end. Put back a copy of "
                f"{self._folder}, or cut the damage off (and lose what follows it): {repair_command(self._binary, damaged)}"
            )
        raise RestartLimit(f"the embedded Redis ended with code {code} while starting; its log is {self._log_file}")

    @property
    def _log_file(self) -> Path:
        return self._folder / "redis.log"

    async def _keep_alive(self) -> None:
        """consumes: the end of the server process      waits for:    a crash
        produces: a server with the same data         unblocked by: cancellation, or too many crashes (RestartLimit)
        """
        while True:
            code = await self._process.wait()
            now = time.monotonic()
            while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) >= MAX_RESTARTS:
                crashes = f"{MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
                raise RestartLimit(f"the embedded Redis crashed {crashes}; its log is {self._log_file}")
            self._restarts.append(now)
            log.error("the embedded Redis ended with code %s and is started again", code)
            await self._start()

    async def _stop(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _binary_for(folder: Path) -> Path:
    """Return the server binary that wrote the data there, if it is still installed: another may be unable to read it."""
    note = folder / "server"
    if note.exists() and (before := Path(note.read_text().strip())).exists():
        return before
    chosen = find_binary()
    folder.mkdir(parents=True, exist_ok=True)
    with report_write_error(note, log.warning):  # the note only matters where several servers are installed
        write_whole(note, f"{chosen}\n")
    return chosen


async def _lock(folder: Path) -> int:
    """Lock the data folder. The server process inherits the lock, so it is released exactly when the server ends."""
    descriptor = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    began = time.monotonic()
    while not try_lock(descriptor):
        owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        if time.monotonic() - began > (PREDECESSOR_S if _is_running(owner) else ORPHAN_S):
            os.close(descriptor)
            raise ConfigError(f"process {owner} serves the Redis data in {folder} already; stop it, or choose another run.name")
        await asyncio.sleep(0.05)  # a file lock cannot be awaited, and this one is about to be released
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _is_running(process: str) -> bool:
    return Path("/proc", process).exists() if process.isdigit() and Path("/proc/self").exists() else True


def is_asleep(config: Config) -> bool:
    """Whether the run has an embedded server's data and no server is running on them."""
    path = config.redis_folder / "server.lock"
    if config.redis.url or not path.exists():
        return False
    with path.open() as lock:
        return try_lock(lock)


def _delete_leftovers(folder: Path) -> None:
    """Delete the half-written copies of servers that were killed while they rewrote their file."""
    for pattern in ("temp-*.aof", "temp-*.rdb"):
        for leftover in (*folder.glob(pattern), *folder.glob(f"appendonlydir/{pattern}")):
            leftover.unlink(missing_ok=True)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # looked up before any fork


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
