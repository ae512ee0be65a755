"""Processes outside the run that connect to every port of the wire: they learn nothing and stop nothing."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.board.inbox import Inbox
from async_rl.transport.messages import (
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    PushBegin,
    ToWorkers,
)
from tests.scenarios.wire.test_wire import Worker, running
from tests.scenarios.wire.wire_stream import ROWS, WIRE
from tests.support.listening import IS_TOLD, listeners
from tests.support.waiting import PATIENCE_S
from tests.support.warm_processes import running_module
from tests.support.wire_board import board_of
from tests.support.wire_weights import weights

FEW_DESCRIPTORS, SCANS, HALF_OPEN = 400, 1100, 400

pytestmark = pytest.mark.skipif(not IS_TOLD, reason="needs Linux to tell which ports a process has")


@asynccontextmanager
async def learner(url: str, run: str) -> AsyncIterator[BaseProcess]:
    with running_module("tests.scenarios.wire.wire_stream", url, run) as process:
        assert process.pid is not None
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, hard))
        yield process


def scan(port: int) -> None:
    for _ in range(SCANS):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


async def test_a_port_scan_finds_one_port_that_answers_nothing_and_stops_nothing(redis_server: str, run_name: str) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        board_of(redis_server, run_name) as board,
        learner(redis_server, run_name) as process,
        running(worker := Worker(board, "w", weights(0, rows=ROWS), WIRE)),
    ):
        await worker.serves_more()
        before = len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208
        [(host, port)] = listeners(process.pid)
        assert host == "127.0.0.1", "where weights are pulled from; process groups do not listen once they are built"
        assert await asyncio.to_thread(said_to, port, b"GET /guess/1 HTTP/1.0\r\n\r\n") == 404
        with pytest.raises(DistError):
            await asyncio.to_thread(TCPStore, host, port, wait_for_workers=False, timeout=timedelta(seconds=2))
        await asyncio.to_thread(scan, port)
        await worker.serves_more()
        with ExitStack() as half_open:
            for _ in range(HALF_OPEN):
                half_open.enter_context(socket.create_connection((host, port)))
            async with running(late := Worker(board, "late", weights(0, rows=ROWS), WIRE)):  # a new group is formed
                await late.serves_more()
                await worker.serves_more()
        while len(os.listdir(f"/proc/{process.pid}/fd")) > before + 30:  # noqa: ASYNC110, PTH208
            await asyncio.sleep(0.05)
        assert process.exitcode is None


def said_to(port: int, request: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        answer = connection.makefile("rb").readline()
    found = re.match(rb"HTTP/1.. (\d+)", answer)
    return int(found[1]) if found else 0


@pytest.mark.slow
async def test_scans_while_groups_are_being_built_stop_nothing(redis_server: str, run_name: str) -> None:
    """A scan without pauses also hits ports that are open only while a group is built."""
    async with (
        asyncio.timeout(PATIENCE_S),
        board_of(redis_server, run_name) as board,
        learner(redis_server, run_name) as process,
        running(worker := Worker(board, "w", weights(0, rows=ROWS), WIRE)),
    ):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1024, resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]))
        await worker.serves_more()
        ended = asyncio.Event()

        def scan_all() -> None:
            while not ended.is_set():
                for _, port in listeners(process.pid):
                    with suppress(OSError):
                        socket.create_connection(("127.0.0.1", port), timeout=1).close()

        scanning = asyncio.create_task(asyncio.to_thread(scan_all))
        try:
            for number in range(3):  # each makes all groups be built anew
                async with running(joined := Worker(board, f"joined {number}", weights(0, rows=ROWS), WIRE)):
                    await joined.serves_more()
        finally:
            ended.set()
            await scanning
        await worker.serves_more()
        assert process.exitcode is None


async def test_groups_are_built_anew_when_descriptors_become_scarce(redis_server: str, run_name: str) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        board_of(redis_server, run_name) as board,
        learner(redis_server, run_name) as process,
        running(worker := Worker(board, "w", weights(0, rows=ROWS), WIRE)),
    ):
        _, hard = resource.prlimit(
            process.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS * 4, resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1])
        )
        await worker.serves_more(2)
        told = await Inbox.open(board, TO_WORKERS, TO_WORKERS_MESSAGES)
        assert len(await groups(told, pushes=3)) == 1, "kept from push to push"
        open_now = len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (2 * open_now - 8, hard))
        await groups(told, pushes=1)
        assert len(await groups(told, pushes=3)) == 3
        await worker.serves_more()


async def groups(told: Inbox[ToWorkers], *, pushes: int) -> set[str]:
    """The names of those that the next pushes go over."""
    found: list[str] = []
    while len(found) < pushes:
        found += [message.groups[0].group for message in await told.read() if isinstance(message, PushBegin)]
    return set(found[:pushes])
