"""A Redis that asks for a password, at a port of the loopback interface."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.private_server import client_of, running, wait_until_it_answers

PASSWORD = "not-in-any-script"


@contextmanager
def served_redis(binary: Path) -> Iterator[str]:
    """Yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="arl") as folder:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--requirepass", PASSWORD, "--dir", folder, "--save", ""]
        with running([str(binary), *options, "--maxmemory-policy", "noeviction", "--appendonly", "yes"]) as process:
            with client_of(host="127.0.0.1", port=port, password=PASSWORD) as client:
                assert wait_until_it_answers(client, process)
            yield f"redis://127.0.0.1:{port}"
