"""The weight wire between processes that are killed and stopped: the others get the version, and whoever wakes catches up."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from wire_board import board_of
from wire_weights import Sender, sending, weights

from async_rl.config import WireConfig
from async_rl.transport.digest import digest_of
from buffer.board import RedisBoard

OPERATION_TIMEOUT_S = 4.0
WIRE = WireConfig(operation_timeout_s=OPERATION_TIMEOUT_S, bucket_mb=0.25, shared_memory=False)
WORKER = Path(__file__).with_name("wire_worker.py")


class Fleet:
    """Worker processes, and what they say they serve."""

    def __init__(self, url: str, board: RedisBoard, run: str) -> None:
        self.board = board
        self._url = url
        self._run = run
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._served: dict[str, list[tuple[int, str]]] = {}
        self._heard = "0"

    async def start(self, name: str, fault: str = "") -> None:
        self._served[name] = []
        self._processes[name] = await asyncio.create_subprocess_exec(
            *[sys.executable, "-P", str(WORKER), self._url, self._run, name, str(OPERATION_TIMEOUT_S), fault],
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parent), "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )

    async def serves(self, version: int, *names: str) -> list[str]:
        """Wait until each has served `version`; returns the digests it was served under."""
        while not all(any(served == version for served, _ in self._served[name]) for name in names):
            for position, message in await self.board.read("served", self._heard, 5.0):
                self._heard = position
                self._served[message["member"]].append((message["version"], message["digest"]))
        return [digest for name in names for served, digest in self._served[name] if served == version]

    def versions_of(self, name: str) -> Sequence[int]:
        return [version for version, _ in self._served[name]]

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    async def ended(self, name: str) -> int:
        return await self._processes[name].wait()

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


async def all_needy(sender: Sender, version: int, *names: str) -> None:
    while set(await sender.needed(version)) < set(names):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", ["SIGKILL:ready", "SIGKILL:begin", "SIGSTOP:ready", "SIGSTOP:begin"])
async def test_a_worker_struck_during_a_push_costs_the_others_nothing_but_time(
    redis_server: str, run_name: str, fault: str
) -> None:
    large = weights(seed=1, rows=4000)
    async with fleet_of(redis_server, run_name) as fleet, sending(fleet.board, WIRE, weights(0)) as sender:
        await fleet.start("a")
        await fleet.start("struck", fault)
        await fleet.start("b")
        await all_needy(sender, 1, "a", "b", "struck")
        report = await sender.push(1, large)
        assert set(report.staged) == {"a", "b"}
        assert set(report.dropped) == {"struck"}
        await sender.flip(1)
        assert await fleet.serves(1, "a", "b") == [digest_of(large)] * 2

        if fault.startswith("SIGKILL"):
            assert await fleet.ended("struck") == -signal.SIGKILL
            await fleet.start("struck")  # its supervisor starts it again, under the same id
        else:
            fleet.signal("struck", signal.SIGCONT)
        await all_needy(sender, 1, "struck")
        assert (await sender.push(1, large)).staged == ("struck",)
        await sender.flip(1)
        assert await fleet.serves(1, "struck") == [digest_of(large)]

        following = weights(seed=2)
        report = await sender.push(2, following)
        assert set(report.staged) == {"a", "b", "struck"}
        await sender.flip(2)
        assert len(set(await fleet.serves(2, "a", "b", "struck"))) == 1
    assert all(fleet.versions_of(name) == [1, 2] for name in ("a", "b", "struck"))


async def test_when_the_only_worker_dies_the_push_ends_and_says_so(redis_server: str, run_name: str) -> None:
    pushed = weights(seed=1)
    async with fleet_of(redis_server, run_name) as fleet, sending(fleet.board, WIRE, weights(0)) as sender:
        await fleet.start("only", "SIGKILL:begin")
        await all_needy(sender, 1, "only")
        report = await sender.push(1, pushed)
        assert report.staged == ()
        assert report.dropped == {"only": "died or hung while receiving"}
