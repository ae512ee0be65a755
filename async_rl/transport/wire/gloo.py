"""Process groups over gloo that nobody else reaches once they are built.

gloo listens at a port for as long as a group lives. It asks nobody who connects for anything, keeps a descriptor for each
connection that never says what it is for, and ends the process when there are no more descriptors: a port scan is enough. But
all members of a group are connected to each other when it is built, and then the listener is of no more use. torch has no way
to close it. So another socket, which has no address, is put in its place: under the same number, in the same epoll.

Only Linux says what an epoll watches (/proc/self/fdinfo). Elsewhere the listeners stay.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_OPENING = Lock()
"""What appears while one device is opened is that device's."""

_OURS = Path("/proc/self")


def connect(
    store: Store, rank: int, size: int, *, host: str, timeout: timedelta, connections: int = 1, threads: int = 2
) -> ProcessGroupGloo:
    """Build a group with the members that call this over the same store.

    `host` is the address at which this end listens until all are connected. Each pair of members has `connections`, each with
    a thread that serves it; gloo takes them in turn. `threads` run the operations.
    """
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    options._threads = threads
    devices = [_Device.open(host) for _ in range(connections)]
    options._devices = [each.device for each in devices]
    group = ProcessGroupGloo(store, rank, size, options)
    for each in devices:
        each.stop_listening()
    return group


@contextmanager
def closed_listeners() -> Iterator[None]:
    """For groups that are built within by torch's own means, as Megatron's are: in the end they do not listen any more.

    Not for groups that connect later (TORCH_GLOO_LAZY_INIT).
    """
    epolls, inodes = _epolls(), {each.inode for each in _watched_listeners()}
    yield
    for each in _watched_listeners():
        if each.epoll not in epolls and each.inode not in inodes:
            each.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    device: Any
    """gloo's: a listener, and a thread that waits on an epoll."""
    listener: _Listener | None
    """None where it is not known."""

    @classmethod
    def open(cls, host: str) -> _Device:
        with _OPENING:
            before = {each.inode for each in _watched_listeners()}
            device = ProcessGroupGloo.create_device(hostname=host)
            # The other thing that it watches wakes its thread up.
            found = [each for each in _watched_listeners() if each.inode not in before and each.num_watched == 2]
        return cls(device=device, listener=found[0] if len(found) == 1 else None)

    def stop_listening(self) -> None:
        if self.listener is not None:
            self.listener.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    epoll: int
    """The descriptor of the epoll that watches it."""
    number: int
    """Its own."""
    inode: str
    """Which socket it is."""
    num_watched: int
    """By its epoll."""

    def close(self) -> None:
        with _unreachable() as other:
            os.dup2(other.fileno(), self.number, inheritable=False)  # closes gloo's, which so leaves the epoll
        with select.epoll.fromfd(os.dup(self.epoll)) as epoll:
            epoll.register(self.number, 0)  # gloo takes it out in the end, and aborts the process if it is not there


def _epolls() -> set[int]:
    """Their descriptors; none where the system does not say."""
    found: set[int] = set()
    with suppress(OSError):
        for link in (_OURS / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if str(link.readlink()) == "anon_inode:[eventpoll]":
                    found.add(int(link.name))
    return found


def _watched_listeners() -> list[_Listener]:
    """Of each epoll that watches one listener."""
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
    """Listens, as gloo expects of it, under a name that is gone."""
    other = socket.socket(socket.AF_UNIX)
    other.setblocking(False)
    with TemporaryDirectory(prefix="async-rl-") as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            other.bind(f"/proc/self/fd/{handle}/none")  # a name may have 107 bytes only, and the folder's may be longer
        finally:
            os.close(handle)
    other.listen(0)
    return other
