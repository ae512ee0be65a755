"""Memory for a parcel, which processes of the same machine can read in place: workers a sender's, and ranks of engines their
worker's.

On a CPU it is a memfd, which other processes open through /proc/PID/fd: it has no name that could be left behind, and is freed
with the last process that has it open. A sender's readers hold a shared flock, and it writes only under an exclusive one; the
kernel releases the locks of processes that died. For a GPU's memory such a file holds the CUDA IPC handle, and is its lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from async_rl.durable.file_lock import try_lock

_ON_HOST = "async-rl-weights"
_ON_GPU = "async-rl-gpu-weights"


class ParcelMemory:
    """The side of the owner, who writes it."""

    def __init__(self, num_bytes: int, device: torch.device, *, shared: bool) -> None:
        self._fd: int | None = None
        if device.type == "cuda":
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._fd = _cuda_handle_file(self.data) if shared else None
        elif shared and (fd := _reserve(num_bytes)) is not None:
            self._fd = fd
            # The tensor's views keep the mapping alive.
            self.data = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        else:
            self.data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> str:
        """Path under which processes of this machine open it; empty when they cannot."""
        return "" if self._fd is None else _path(self._fd)

    own_address = address
    """See MappedMemory."""

    def lock_exclusively(self) -> bool:
        """Take the writer's lock without waiting: False when there are readers. New readers are kept out until `unlock`."""
        return self._fd is None or try_lock(self._fd)

    def unlock(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class MappedMemory:
    """The reader's side: another process' memory, mapped into this one."""

    def __init__(self, address: str, fd: int, data: torch.Tensor) -> None:
        self.address = address
        self._fd = fd
        self.data = data

    @property
    def own_address(self) -> str:
        """Path for processes of this machine that lasts as long as this mapping, even if the owner ends; empty for a GPU's
        memory whose owner has ended: its handle opens nothing any more.
        """
        return _path(self._fd) if self.data.device.type == "cpu" or self.is_current else ""

    @classmethod
    def open(cls, address: str, num_bytes: int, devices: Iterable[torch.device]) -> MappedMemory | None:
        """None when the memory is on another machine, on a GPU that is not among `devices`, or may not be read. The same path
        may name another file here.
        """
        with suppress(OSError):
            kind = str(Path(address).readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
            if kind not in (_ON_HOST, _ON_GPU):
                return None
            fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            with ExitStack() as unless_opened:
                unless_opened.callback(os.close, fd)
                data = _mapped(fd, num_bytes) if kind == _ON_HOST else _on_gpu(fd, num_bytes, devices)
                if data is not None:
                    unless_opened.pop_all()
                    return cls(address, fd, data)
        return None

    @property
    def is_current(self) -> bool:
        """Whether the address still names this memory: its owner may have ended, and its process id may be reused."""
        with suppress(OSError):
            return os.path.samestat(Path(self.address).stat(), os.fstat(self._fd))
        return False

    def lock_shared(self) -> bool:
        """Take the reader's lock without waiting: False while the memory is being written."""
        return try_lock(self._fd, shared=True)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        os.close(self._fd)


class MappedMemories:
    """Memories that stay mapped from version to version: their owners use the same ones in turn.

    A GPU's is opened anew: it would not be free before all processes that have it open have closed it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._known: dict[str, MappedMemory] = {}

    def open(self, address: str, num_bytes: int) -> MappedMemory | None:
        """See MappedMemory.open."""
        memory = self._known.get(address)
        if memory is None or not memory.is_current:
            memory = MappedMemory.open(address, num_bytes, self._devices) if address else None
        if memory is not None and memory.data.device.type == "cpu":
            self._known[address] = memory
        return memory

    def drop_ended(self) -> None:
        """Unmap what its owner has given up."""
        self._known = {address: memory for address, memory in self._known.items() if memory.is_current}


def _path(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


def _reserve(num_bytes: int) -> int | None:
    """A memfd with its pages allocated; None where the system has none, or too little memory.

    Without allocation, the first write to a missing page would kill the process.
    """
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
    # Private: a stray write in this process cannot reach the sender.
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _cuda_handle_file(data: torch.Tensor) -> int | None:
    from async_rl.transport.wire import cuda_ipc as gpu_memory  # imported with CUDA only

    try:
        handle = gpu_memory.describe(data)
    except RuntimeError:  # not every system and allocator can share it
        return None
    fd = os.memfd_create(_ON_GPU, os.MFD_CLOEXEC)
    os.write(fd, handle)
    return fd


def _on_gpu(fd: int, num_bytes: int, devices: Iterable[torch.device]) -> torch.Tensor | None:
    from async_rl.transport.wire import cuda_ipc as gpu_memory

    with suppress(RuntimeError, ValueError):
        data = gpu_memory.open_handle(os.pread(fd, os.fstat(fd).st_size, 0), devices)
        if data is not None and len(data) == num_bytes:
            return data
    return None
