"""gloo process groups that stop listening once they are connected.

gloo listens on a port for as long as a group lives. It authenticates no connection, keeps a descriptor for each one that sends
nothing, and ends the process when descriptors run out: a port scan is enough. But all members of a group are connected to
each other once it is built, and the listener is not needed any more. torch cannot close it. So this module replaces it by a
socket without an address: under the same descriptor, in the same epoll.

Only Linux lists what an epoll watches (/proc/self/fdinfo). On other systems the listeners stay open.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_OPENING = Lock()
"""Held while one device is opened, so that a new listener is known to be that device's."""

_OURS = Path("/proc/self")

_GLOO: Any = ProcessGroupGloo
"""torch's stubs leave its options out, and the type of its devices."""


def connect(
    store: Store, rank: int, size: int, *, host: str, timeout: timedelta, connections: int = 1, threads: int = 2
) -> ProcessGroupGloo:
    """Build a group with the other members that call this with the same store; blocks until all are connected.

    `host`: the address at which this end listens meanwhile. `connections`: per pair of members, each with a thread of its own;
    gloo uses them round-robin. `threads`: run the operations.
    """
    options = _GLOO._Options()
    options._timeout = timeout
    options._threads = threads
    opened = [_open_device(host) for _ in range(connections)]
    options._devices = [device for device, _ in opened]
    group = ProcessGroupGloo(store, rank, size, options)
    for _, listener in opened:
        if listener is not None:
            listener.close()
    return group


@contextmanager
def closed_listeners() -> Generator[None]:
    """Close the listeners of gloo groups that torch itself builds inside the context, as Megatron's are.

    Not for groups that connect later (TORCH_GLOO_LAZY_INIT).
    """
    epolls, inodes = _epolls(), {each.inode for each in _watched_listeners()}
    yield
    for each in _watched_listeners():
        if each.epoll not in epolls and each.inode not in inodes:
            each.close()


def _open_device(host: str) -> tuple[Any, _Listener | None]:
    """gloo's device, which is a listener and a thread that waits on an epoll; and its listener, None if it was not found."""
    with _OPENING:
        before = {each.inode for each in _watched_listeners()}
        device = _GLOO.create_device(hostname=host)
        # The epoll watches two descriptors: the listener, and one that wakes the thread.
        found = [each for each in _watched_listeners() if each.inode not in before and each.num_watched == 2]
    return device, found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    epoll: int
    """The descriptor of the epoll that watches it."""
    number: int
    """The listener's descriptor."""
    inode: str
    """Identifies the socket."""
    num_watched: int
    """Descriptors that the epoll watches."""

    def close(self) -> None:
        with _unreachable() as other:
            os.dup2(other.fileno(), self.number, inheritable=False)  # closes gloo's socket, which removes it from the epoll
        with select.epoll.fromfd(os.dup(self.epoll)) as epoll:
            epoll.register(self.number, 0)  # gloo removes it at the end, and aborts the process if it is missing


def _epolls() -> set[int]:
    """The process' epoll descriptors; empty on systems that do not list them."""
    found: set[int] = set()
    with suppress(OSError):
        for link in (_OURS / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if str(link.readlink()) == "anon_inode:[eventpoll]":
                    found.add(int(link.name))
    return found


def _watched_listeners() -> list[_Listener]:
    """The listeners of all epolls that watch exactly one."""
    found: list[_Listener] = []
    for epoll in _epolls():
        with suppress(OSError):
            description = (_OURS / "fdinfo" / str(epoll)).read_text()
            watched = [int(number) for number in re.findall(r"^tfd:\s*(\d+)", description, re.MULTILINE)]
            listeners = [number for number in watched if _is_listening(number)]
            if len(listeners) == 1:
                inode = str((_OURS / "fd" / str(listeners[0])).readlink())
                found.append(_Listener(epoll=epoll, number=listeners[0], inode=inode, num_watched=len(watched)))
    return found


def _is_listening(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as copy:
            is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            return is_internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError:
        return False


def _unreachable() -> socket.socket:
    """A listening Unix socket, as gloo expects, whose name is already deleted."""
    other = socket.socket(socket.AF_UNIX)
    other.setblocking(False)
    with TemporaryDirectory(prefix="async-rl-") as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            other.bind(
                f"/proc/self/fd/{handle}/none"
            )  # a socket's name has at most 107 bytes, and the folder's path may be longer
        finally:
            os.close(handle)
    other.listen(0)
    return other
