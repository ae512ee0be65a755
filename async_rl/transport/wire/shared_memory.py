"""Where a version's parcel lies at its sender: memory that processes of the same machine can read in place.

On a CPU it is anonymous shared memory, which others open through the owner's file descriptors: it has no name that could be
left behind, and is gone with the last process that holds it. Whoever reads holds a shared lock; the owner writes only when it
can have the lock alone. The kernel frees the locks of processes that died. A GPU's memory is described in such a file, which
lends it address and lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

_ON_HOST = "async-rl-weights"
_ON_GPU = "async-rl-gpu-weights"


class ParcelMemory:
    """A sender's own."""

    def __init__(self, num_bytes: int, device: torch.device, *, shared: bool) -> None:
        self._fd: int | None = None
        if device.type == "cuda":
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._fd = _described(self.data) if shared else None
        elif shared and (fd := _reserve(num_bytes)) is not None:
            self._fd = fd
            # Its views keep it alive: it is unmapped when the last of them is gone.
            self.data = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        else:
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

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

    def __init__(self, address: str, fd: int, data: torch.Tensor) -> None:
        self.address = address
        self._fd = fd
        self.data = data

    @classmethod
    def open(cls, address: str, num_bytes: int, device: torch.device) -> MappedMemory | None:
        """None when it is on another machine or GPU, or closed to us: the same path may mean something else there."""
        with suppress(OSError):
            kind = str(Path(address).readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
            if kind not in (_ON_HOST, _ON_GPU):
                return None
            fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            data = _mapped(fd, num_bytes) if kind == _ON_HOST else _on_gpu(fd, num_bytes, device)
            if data is not None:
                return cls(address, fd, data)
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
    fd = os.memfd_create(_ON_HOST, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, max(1, num_bytes))
    except OSError:
        os.close(fd)
        return None
    return fd


def _mapped(fd: int, num_bytes: int) -> torch.Tensor | None:
    if os.fstat(fd).st_size != num_bytes:
        return None
    # Private: a stray write of ours would never reach the sender.
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _described(data: torch.Tensor) -> int | None:
    from async_rl.transport.wire import cuda_ipc as gpu_memory  # reached with CUDA only

    try:
        card = gpu_memory.describe(data)
    except RuntimeError:  # not every system and allocator lets processes share it
        return None
    fd = os.memfd_create(_ON_GPU, os.MFD_CLOEXEC)
    os.write(fd, card)
    return fd


def _on_gpu(fd: int, num_bytes: int, device: torch.device) -> torch.Tensor | None:
    from async_rl.transport.wire import cuda_ipc as gpu_memory

    with suppress(RuntimeError, ValueError):
        data = gpu_memory.opened(os.pread(fd, os.fstat(fd).st_size, 0), device)
        if data is not None and len(data) == num_bytes:
            return data
    return None


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
