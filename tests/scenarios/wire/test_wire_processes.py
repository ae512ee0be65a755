"""The weight wire when its only receiver dies. Faults with other receivers left are in test_wire_faults.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from async_rl.config import WireConfig
from tests.support.warm_processes import running_module
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import all_behind, sending, weights

OPERATION_TIMEOUT_S = 10.0
WIRE = WireConfig(operation_timeout_s=OPERATION_TIMEOUT_S, bucket_mb=0.25, shared_memory=False)


class Fleet:
    """Worker processes."""

    def __init__(self, url: str, board: StageBoard, run: str) -> None:
        self.board = board
        self._url = url
        self._run = run
        self._running = ExitStack()

    def start(self, name: str, fault: str = "") -> None:
        worker = running_module("tests.scenarios.wire.wire_worker", self._url, self._run, name, OPERATION_TIMEOUT_S, fault)
        self._running.enter_context(worker)

    def end(self) -> None:
        self._running.close()


@asynccontextmanager
async def fleet_of(url: str, run: str) -> AsyncIterator[Fleet]:
    async with board_of(url, run) as board:
        fleet = Fleet(url, board, run)
        try:
            yield fleet
        finally:
            fleet.end()


async def test_when_the_only_worker_dies_the_push_ends_and_says_so(redis_server: str, run_name: str) -> None:
    pushed = weights(seed=1)
    async with fleet_of(redis_server, run_name) as fleet, sending(fleet.board, WIRE, weights(0)) as sender:
        fleet.start("only", "SIGKILL:begin")
        await all_behind(sender, 1, ["only"])
        report = await sender.push(1, pushed)
        assert report.staged == ()
        assert report.dropped == {"only": "died or hung while receiving"}
