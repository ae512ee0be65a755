"""A worker reduced to its end of the weight wire, as a process that scenarios may kill or stop.

usage: python wire_worker.py URL RUN ID OPERATION_TIMEOUT_S [SIGNAL:MOMENT]

It posts {"member", "version", "digest"} under "served" for every version it serves. With a fault, it sends SIGNAL to itself
at MOMENT: "ready" (it has just answered an offer) or "begin" (a moment after it began to receive).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch

from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.receiving.receiver import WeightReceiver
from buffer.board import RedisBoard
from tests.support.wire_board import board_of
from tests.support.wire_weights import weights


class FaultyBoard:
    """A board that strikes its own process when a given message passes, once."""

    def __init__(self, board: RedisBoard, fault: str) -> None:
        self._board = board
        name, _, self._moment = fault.partition(":")
        self._signal = signal.Signals[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        await self._board.post(topic, message)
        if message.get("kind") == self._moment:
            self._strike()

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        found = await self._board.read(topic, after, wait_s)
        if any(message.get("kind") == self._moment for _, message in found):
            asyncio.get_running_loop().call_later(0.005, self._strike)
        return found

    def _strike(self) -> None:
        self._moment = ""
        os.kill(os.getpid(), self._signal)


async def main(url: str, run: str, member_id: str, operation_timeout_s: str, fault: str = "") -> None:
    wire = WireConfig(operation_timeout_s=float(operation_timeout_s), bucket_mb=0.25, shared_memory=False)
    async with board_of(url, run) as board:

        async def swap(version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            await board.post("served", {"member": member_id, "version": version, "digest": digest_of(tensors)})

        seen: Any = FaultyBoard(board, fault) if fault else board
        member = Member(id=member_id, host="localhost", version=-1, device="cpu")
        await WeightReceiver(seen, board.store, member, specs_of(weights(seed=0)), wire, lease_s=10.0).run(swap)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
