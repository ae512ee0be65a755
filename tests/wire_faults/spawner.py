"""Starts the roles by forking, so that a worker starts in milliseconds though importing torch takes seconds.

Orders come in as lines of JSON, facts leave on file descriptor FACTS: each line is one write, so that lines never mix.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
from typing import Any

import torch

from async_rl.errors import boundary
from async_rl.supervision import die_with_parent
from async_rl.supervision.liveness.leaving import leave_at_once
from async_rl.transport.delta import compact_codec
from async_rl.transport.parcel_transfer import compile_deltas
from tests.wire_faults import learner_role, worker_role
from tests.wire_faults.facts import tell
from tests.wire_faults.network import Network

ROLES = {"worker": worker_role.main, "learner": learner_role.main}


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    if compact_codec.is_available():
        compile_deltas()  # once for all forked processes
    network = Network()
    names: dict[int, str] = {}
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell("spawner", "open", can_cut=network.is_possible)
    unread = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 100)
            _reap(names, network)
        if 0 in ready:
            if not (arrived := os.read(0, 1 << 16)):
                return
            *lines, unread = (unread + arrived).split(b"\n")
            for order in map(json.loads, lines):
                match order.pop("do"):
                    case "start":
                        if (pid := _fork(order, network)) == 0:
                            _run_role(order)
                            return
                        names[pid] = order["name"]
                        tell("spawner", "started", name=order["name"], pid=pid)
                    case "cut":
                        network.cut(**order)
                    case "heal":
                        network.heal(**order)


def _fork(order: dict[str, Any], network: Network) -> int:
    remote = order.pop("remote", False)
    ready_in, ready_out = os.pipe()
    go_in, go_out = os.pipe()
    if (pid := os.fork()) == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        if remote:
            network.leave()
        os.write(ready_out, b".")
        os.read(go_in, 1)
    else:
        os.read(ready_in, 1)
        if remote:
            network.connect(order["name"], pid)
        os.write(go_out, b".")
    for end in (ready_in, ready_out, go_in, go_out):
        os.close(end)
    return pid


def _run_role(order: dict[str, Any]) -> None:
    log = os.open(order.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)  # prints where it hangs
    with leave_at_once(), boundary(order["name"]):
        ROLES[order.pop("role")](**order)


def _reap(names: dict[int, str], network: Network) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if (name := names.pop(pid, None)) is not None:
            network.forget(name)
            tell("spawner", "ended", name=name, pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
