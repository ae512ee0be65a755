"""Advisory locks on open files. The kernel releases a lock when the last process that has the file open ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Take the lock of an open file without waiting, by default for this process alone. False if it is held elsewhere."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
