"""Modules of `tests/` as processes forked from one that has imported torch and Megatron, which would take each six seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.warm_server"])
_SERVER: Any = vars(forkserver)["_forkserver"]


def start_server() -> str:
    """Start the server of this process; returns its address. It ends with this process."""
    _SERVER.ensure_running()
    return _SERVER._forkserver_address


def use_server(address: str | None = None) -> None:
    """Fork from the server at an address, or from the one that this process is a fork of, and start none."""
    if address is not None:
        _SERVER._forkserver_address = address
        _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # forks do not keep it running
    _SERVER.ensure_running = resource_tracker.ensure_running


LEFT_ALONE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    returncode: int
    stderr: str


def run_ranks(module: str, *arguments: object, ranks: int = 2, timeout_s: float = 200) -> list[Ended]:
    """Run a module as that many processes, whose last argument is their rank, to their end. Warnings are errors in them."""
    # Megatron warns tensor-parallel ranks that do not set it, also where there is no CUDA
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            CONTEXT.Process(
                target=_run, args=(module, [*map(str, arguments), str(rank)], environment, str(log)), name=log.name, daemon=True
            )
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        _wait_for_ranks(processes, timeout_s)
        late = [process for process in processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        said = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        assert not late, f"{module}: ranks {[each.name for each in late]} did not end in time; they said: {said}"
        return [
            Ended(returncode=process.exitcode if process.exitcode is not None else -1, stderr=text)
            for process, text in zip(processes, said, strict=True)
        ]


def _wait_for_ranks(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Wait for all to end. After one has failed, the others, which may wait for it, have LEFT_ALONE_S."""
    deadline = time.monotonic() + timeout_s
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + LEFT_ALONE_S)
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            return


def play_ranks(module: str, *arguments: object, ranks: int = 2, timeout_s: float = 200) -> None:
    """As `run_ranks`, and all of them end well."""
    for rank in run_ranks(module, *arguments, ranks=ranks, timeout_s=timeout_s):
        assert rank.returncode == 0, rank.stderr


@contextmanager
def running_module(module: str, *arguments: object) -> Iterator[BaseProcess]:
    """Run a module as a process that does not outlive the block; afterwards print what it said."""
    with tempfile.NamedTemporaryFile() as log:
        process = CONTEXT.Process(
            target=_run, args=(module, list(map(str, arguments)), dict(os.environ), log.name), daemon=True
        )
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()
            print(Path(log.name).read_text(errors="replace"), end="")


def _run(module: str, arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
