"""Makes a server lose confirmed changes, as a power cut, a failover to a lagging replica or a restored backup does.

All of these leave an earlier state; a truncated append-only file is one, an empty file is an emptied server. The cut is between
two scripts, because servers differ in how they read a torn file (Redis 7.0 fails, Valkey 9 does not).
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

VANISHES_S = 10.0


def cut(folder: Path, kept: float) -> int:
    """Keep about this part of the data and return how many bytes were cut. The server's process must have been killed."""
    with (folder / "server.lock").open() as lock:
        _until_locked(lock.fileno())
        gone = 0
        for path in (*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")):
            content = path.read_bytes()
            size = max(end for end in _boundaries(content) if end <= len(content) * kept)
            path.write_bytes(content[:size])
            gone += len(content) - size
        return gone


def _boundaries(content: bytes) -> Iterator[int]:
    """Yield the offsets between changes: after a command, but not inside a transaction."""
    at, inside = 0, False
    yield 0
    with contextlib.suppress(ValueError):  # the last command was cut by the kill
        while at < len(content):
            word, at = _command(content, at)
            inside = (inside or word == b"MULTI") and word != b"EXEC"
            if not inside:
                yield at


def _command(content: bytes, at: int) -> tuple[bytes, int]:
    """Return the first word of the command at `at`, and the offset behind the command."""
    line = content.index(b"\r\n", at)
    count, at, first = int(content[at + 1 : line]), line + 2, b""
    for number in range(count):
        line = content.index(b"\r\n", at)
        start, length = line + 2, int(content[at + 1 : line])
        at = content.index(b"\r\n", start + length) + 2
        if number == 0:
            first = content[start : start + length].upper()
    return first, at


def _until_locked(lock: int) -> None:
    """Wait for the server's lock, which is released when its process has ended, a moment after kill -9."""
    deadline = time.monotonic() + VANISHES_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # a process that is not our child cannot be awaited
