"""A Redis with the options of the embedded server, in a temporary folder of its own."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from buffer.server.embedded.programs import find_binary, server_command

MAX_MEMORY_MB = 6144
START_S = 30.0


@contextmanager
def server() -> Iterator[str]:
    """Start it and yield its address."""
    with tempfile.TemporaryDirectory(prefix="arl") as folder:
        socket = Path(folder) / "redis.sock"
        command = server_command(find_binary(), Path(folder), socket, MAX_MEMORY_MB)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            _wait_until_it_answers(socket)
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


def _wait_until_it_answers(socket: Path) -> None:
    deadline = time.monotonic() + START_S
    with Redis(unix_socket_path=str(socket)) as client:
        while True:
            try:
                client.ping()
                return
            except RedisConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # the creation of a socket cannot be awaited
