"""Fault injection: a process sends itself a signal when a given message of the wire's protocol passes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, cast

from async_rl.protocols import Board
from tests.wire_faults.facts import tell

STRIKES = "strikes"
"""The topic on which the stage announces which process is signalled when."""


class FaultInjector:
    def __init__(self, who: str) -> None:
        self._who = who
        self._moment = ""
        self._after_s = 0.0
        self._signal = signal.SIGKILL

    async def listen(self, board: Board) -> None:
        """Service: arms whatever the stage asks for."""
        heard = "0"
        while True:
            for position, order in await board.read(STRIKES, heard, 5.0):
                heard = position
                if order["who"] == self._who and order["pid"] == os.getpid():
                    self._moment, self._after_s = order["at"], order["after_s"]
                    self._signal = signal.Signals[order["signal"]]
                    tell(self._who, "armed", at=self._moment)

    def passes(self, moment: str) -> None:
        if moment != self._moment:
            return
        self._moment = ""
        if self._after_s > 0:
            asyncio.get_running_loop().call_later(self._after_s, self._strike, moment)
        else:
            self._strike(moment)

    def _strike(self, moment: str) -> None:
        tell(self._who, "struck", at=moment, by=self._signal.name)
        os.kill(os.getpid(), self._signal)

    def watching(self, board: Board) -> Board:
        return cast("Board", _Watched(board, self.passes))


class _Watched:
    """A board on which every message counts as a moment: "read:offer" before it is handled, "posted:ready" after it left."""

    def __init__(self, board: Board, passes: Callable[[str], None]) -> None:
        self._board = board
        self._passes = passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        await self._board.post(topic, message)
        self._passes(f"posted:{message.get('kind')}")

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        found = await self._board.read(topic, after, wait_s)
        for _, message in found:
            self._passes(f"read:{message.get('kind')}")
        return found
