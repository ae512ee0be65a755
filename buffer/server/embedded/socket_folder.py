"""The folder of an embedded server's socket, inside the temporary folder; only this user may enter it.

A socket's path must be short, so it cannot be in the run's folder. A folder is locked as long as its server runs; each server
that starts removes unlocked ones, which killed servers have left.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.durable.file_lock import try_lock
from async_rl.errors import ConfigError

PREFIX = "async-rl-"
NAMES = PREFIX + 16 * "[0-9a-f]"
"""Pattern of the names of socket folders; other temporary files of ours have the same prefix."""
SOCKET = "redis.sock"


@contextmanager
def socket_folder(folder: Path) -> Generator[None]:
    """Make the folder, keep it locked, and remove it on exit."""
    for other in folder.parent.glob(NAMES):
        if other != folder:
            _remove_abandoned(other)
    lock = _make_and_lock(folder)
    try:
        yield
    finally:
        _remove(folder)
        os.close(lock)


def _make_and_lock(folder: Path) -> int:
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # removed as an abandoned one before it was opened
            continue
        found = os.fstat(lock)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(lock)
            raise ConfigError(
                f"{folder} must belong to this user alone (mode 0700), because it holds the Redis socket; remove it"
            )
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for a moment only by a process that removes abandoned folders
        if _is_opened(folder, lock):
            return lock
        os.close(lock)  # removed as an abandoned one before it was locked


def _remove_abandoned(folder: Path) -> None:
    with suppress(OSError):  # another user's, or no folder
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            is_ours = os.fstat(lock).st_uid == os.getuid() and try_lock(lock)
            if is_ours and _is_opened(folder, lock) and not _is_served(folder / SOCKET):
                _remove(folder)
        finally:
            os.close(lock)


def _is_opened(folder: Path, descriptor: int) -> bool:
    """Whether the folder that was opened is still there: it may have been removed, and made again."""
    with suppress(FileNotFoundError):
        return folder.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _is_served(path: Path) -> bool:
    """Whether a server listens there: one of an earlier release does not lock its folder."""
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.settimeout(1)
        client.connect(str(path))
        return True
    return False


def _remove(folder: Path) -> None:
    with suppress(OSError):
        (folder / SOCKET).unlink(missing_ok=True)
        folder.rmdir()  # fails if other files are in it, which are not ours to delete
