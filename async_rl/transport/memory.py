"""Where a version's parcel lies at its sender: memory that processes of the same machine can read in place.

On a CPU it is anonymous shared memory, which others open through the owner's file descriptors: it has no name that could be
left behind, and is gone with the last process that holds it. Whoever reads holds a shared lock; the owner writes only when it
can have the lock alone. The kernel frees the locks of processes that died.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

_NAME = "async-rl-weights"


class Memory:
    """A sender's own."""

    def __init__(self, num_bytes: int, device: torch.device, *, shared: bool) -> None:
        self._fd = _reserve(num_bytes) if shared and device.type == "cpu" else None
        if self._fd is None:
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            # Its views keep it alive: it is unmapped when the last of them is gone.
            self.data = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)

    @property
    def address(self) -> str:
        """Under which a process of this machine opens it; empty when none can."""
        return "" if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def claim(self) -> bool:
        """Whether nobody reads it; then nobody begins to until `release`."""
        return self._fd is None or _lock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        if self._fd is not None:
            _lock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class MappedMemory:
    """A sender's memory in a process that reads it."""

    def __init__(self, address: str, fd: int, num_bytes: int) -> None:
        self.address = address
        self._fd = fd
        # Private: a stray write of ours would never reach the sender.
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def open(cls, address: str, num_bytes: int) -> MappedMemory | None:
        """None when it is on another machine, or closed to us: the same path may mean something else there."""
        with suppress(OSError):
            if not str(Path(address).readlink()).startswith(f"/memfd:{_NAME}"):
                return None
            fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(fd).st_size == num_bytes:
                return cls(address, fd, num_bytes)
            os.close(fd)
        return None

    @property
    def is_current(self) -> bool:
        """Whether the address still leads here: its owner may have ended, and another process have its number."""
        with suppress(OSError):
            return os.path.samestat(Path(self.address).stat(), os.fstat(self._fd))
        return False

    def hold(self) -> bool:
        """Keep it from being written to. False while it is."""
        return _lock(self._fd, fcntl.LOCK_SH)

    def let_go(self) -> None:
        _lock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        os.close(self._fd)


def _reserve(num_bytes: int) -> int | None:
    """None where the system has no such memory, or too little: better now than at the first write to a missing page."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, max(1, num_bytes))
    except OSError:
        os.close(fd)
        return None
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
