"""NCCL process groups whose failures reach the thread that waits, and end no process.

torch gives a group a watchdog, which ends the process when an operation fails or times out, and a monitor, which ends it when
the watchdog is stuck or has reported a failure of any group. Losing a peer is no reason to end a learner or a worker, so the
wire's groups are built with TORCH_NCCL_BLOCKING_WAIT, which a group reads when it is constructed: torch then starts neither
thread, and `Work.is_completed` and `Work.wait` look for errors (ProcessGroupNCCL.cpp, torch 2.11 to 2.13).
TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would not do: the watchdog goes on reporting to the monitor of the process's first group.

On an H200 a group of one was made, aborted and made again; groups between GPUs have not run: docs/gpu.md.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore  # where torch's own type stubs have it

from async_rl.transport.wire.rendezvous import WireRendezvous

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"

_CONSTRUCTING = Lock()
"""Held while a group is constructed: it reads environment variables, which belong to the whole process."""


def connect(rendezvous: WireRendezvous, group: str, rank: int, size: int, *, device: torch.device, timeout: timedelta) -> Any:
    """Build a group with the other members that call this with the same name; its communicator follows at its first operation.

    `timeout`: for building the communicator, which cannot be interrupted; of the process's first group, for all of them.
    """
    from torch.distributed import ProcessGroupNCCL  # not in CPU builds of torch

    torch.cuda.set_device(device)  # the current device belongs to the thread
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0  # or a dead peer would block the thread that builds the communicator for ever
    store = _store(rendezvous, group, rank, timeout)
    with without_watchdog(timeout):
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def without_watchdog(timeout: timedelta) -> Generator[None]:
    """Construct groups inside the context without torch's watchdog and monitor."""
    with _CONSTRUCTING:
        os.environ.setdefault(NONBLOCKING_TIMEOUT, str(math.ceil(timeout.total_seconds())))  # torch's own is half an hour
        before = os.environ.get(BLOCKING_WAIT, "0")
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            # Never removed again: other threads may be reading the environment, whose entries would move.
            os.environ[BLOCKING_WAIT] = before


def _store(rendezvous: WireRendezvous, group: str, rank: int, timeout: timedelta) -> Store:
    """A TCPStore for this group alone: NCCL's threads use it from C++ for as long as the group lives.

    The sender hosts it, at an address that the others read from the run's Redis. It has no password, like NCCL's own
    sockets: see docs/weights.md.
    """
    where = f"{group}/nccl"
    if rank > 0:
        rendezvous.store.wait([where], timeout)
        host, _, port = rendezvous.store.get(where).decode().rpartition(" ")
        return TCPStore(host, int(port), wait_for_workers=False, timeout=timeout)
    family = socket.getaddrinfo(rendezvous.address, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((rendezvous.address, 0), family=family)  # torch would listen at every interface
    port = listening.getsockname()[1]
    store = TCPStore(
        rendezvous.address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
    rendezvous.store.set(where, f"{rendezvous.address} {port}")
    return store
