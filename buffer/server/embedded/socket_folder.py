"""Where an embedded server's socket lies: a folder of the temporary folder that only this user may enter.

A socket's path must be short, so it cannot lie in the run's folder. What servers that were killed have left is removed when the
next one starts: a folder is locked for as long as its server lives.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.errors import ConfigError

PREFIX = "async-rl-"
NAMES = PREFIX + 16 * "[0-9a-f]"
"""Of socket folders. Other temporary files of ours begin with the same prefix."""
SOCKET = "redis.sock"


@contextmanager
def socket_folder(folder: Path) -> Generator[None]:
    """Make it, keep it locked, and remove it in the end."""
    for other in folder.parent.glob(NAMES):
        if other != folder:
            _remove_abandoned(other)
    lock = _made_and_locked(folder)
    try:
        yield
    finally:
        _remove(folder)
        os.close(lock)


def _made_and_locked(folder: Path) -> int:
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        found = os.fstat(lock)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(lock)
            raise ConfigError(
                f"{folder} must belong to this user alone (mode 0700), because it holds the Redis socket; remove it"
            )
        fcntl.flock(lock, fcntl.LOCK_EX)  # only who removes an abandoned folder may have it, for a moment
        if folder.exists() and folder.stat().st_ino == found.st_ino:
            return lock
        os.close(lock)  # removed as an abandoned one before it was locked


def _remove_abandoned(folder: Path) -> None:
    with suppress(OSError):  # another user's, or no folder
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_served(folder / SOCKET):
                    _remove(folder)
        finally:
            os.close(lock)


def _is_served(path: Path) -> bool:
    """By a server of an earlier release, which locks nothing."""
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.settimeout(1)
        client.connect(str(path))
        return True
    return False


def _remove(folder: Path) -> None:
    with suppress(OSError):
        (folder / SOCKET).unlink(missing_ok=True)
        folder.rmdir()  # fails where something else lies in it, which is not ours to delete
