"""Redis servers of our own for tests: never somebody's port 6379."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from buffer.embedded_server import find_binary, server_command


def binaries() -> dict[str, Path]:
    """Every server here that the buffer must run on: the one that comes with us, and what is installed."""
    installed = {name: Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name))}
    return {"bundled": find_binary(path=""), **installed}


@contextmanager
def private_server(binary: Path, *, max_memory_mb: int = 256) -> Iterator[str]:
    """A server in a folder of its own; yields its address."""
    with tempfile.TemporaryDirectory(prefix="arl") as folder:
        socket = Path(folder) / "redis.sock"
        process = subprocess.Popen(
            server_command(binary, Path(folder), socket, max_memory_mb), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        try:
            _wait_until_it_answers(socket)
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


def _wait_until_it_answers(socket: Path) -> None:
    deadline = time.monotonic() + 30
    with Redis(unix_socket_path=str(socket)) as client:
        while True:
            try:
                client.ping()
                return
            except RedisConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
