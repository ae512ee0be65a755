"""The weight wire when its only receiver dies. Faults with other receivers left are in test_wire_faults.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_rl.config import WireConfig
from tests.support.repository import module_command, module_environment
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import all_behind, sending, weights

OPERATION_TIMEOUT_S = 4.0
WIRE = WireConfig(operation_timeout_s=OPERATION_TIMEOUT_S, bucket_mb=0.25, shared_memory=False)


class Fleet:
    """Worker processes."""

    def __init__(self, url: str, board: StageBoard, run: str) -> None:
        self.board = board
        self._url = url
        self._run = run
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, fault: str = "") -> None:
        self._processes[name] = await asyncio.create_subprocess_exec(
            *module_command("tests.scenarios.wire.wire_worker", self._url, self._run, name, OPERATION_TIMEOUT_S, fault),
            env=module_environment(),
        )

    async def end(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def fleet_of(url: str, run: str) -> AsyncIterator[Fleet]:
    async with board_of(url, run) as board:
        fleet = Fleet(url, board, run)
        try:
            yield fleet
        finally:
            await fleet.end()


async def test_when_the_only_worker_dies_the_push_ends_and_says_so(redis_server: str, run_name: str) -> None:
    pushed = weights(seed=1)
    async with fleet_of(redis_server, run_name) as fleet, sending(fleet.board, WIRE, weights(0)) as sender:
        await fleet.start("only", "SIGKILL:begin")
        await all_behind(sender, 1, ["only"])
        report = await sender.push(1, pushed)
        assert report.staged == ()
        assert report.dropped == {"only": "died or hung while receiving"}
