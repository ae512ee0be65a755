"""A rollout worker whose engine only checks, at every tick, that its weights are those of its version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.supervision import drain_on_signals, run_with
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.receiving.receiver import WeightReceiver
from tests.support.wire_board import board_of
from tests.support.wire_weights import weights
from tests.wire_faults.facts import tell
from tests.wire_faults.strike import FaultInjector

ROWS = 500
TICK_S = 0.02
"""Between two sampled tokens."""
LEASE_S = 4.0


class Engine:
    """Checks its weights continuously, and reports whenever they change."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor], faults: FaultInjector, tick_s: float) -> None:
        self._name = name
        self._tick_s = tick_s
        self._tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        self._faults = faults
        self._version = -1
        self._between_tokens = asyncio.Lock()

    async def swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        async with self._between_tokens:
            for number, (name, tensor) in enumerate(tensors.items()):
                if number == len(tensors) // 2:
                    self._faults.passes("swap")
                self._tensors[name].copy_(tensor)
            self._version = version

    async def sample(self) -> None:
        """Service."""
        seen, last, longest = (-1, ""), time.monotonic(), 0.0
        while True:
            await asyncio.sleep(self._tick_s)
            async with self._between_tokens:
                found = (self._version, digest_of(self._tensors) if self._version >= 0 else "")
            longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
            if found != seen:
                tell(self._name, "serves", version=found[0], digest=found[1], pause_s=round(longest, 3))
                seen, longest = found, 0.0


def main(*, name: str, url: str, run: str, wire: dict[str, Any], other_model: bool = False, tick_s: float = TICK_S) -> None:
    tensors = weights(seed=0, rows=ROWS)
    if other_model:
        tensors["layers.0.norm"] = torch.zeros(65)
    asyncio.run(_live(name, url, run, WireConfig(**wire), tensors, tick_s))


async def _live(name: str, url: str, run: str, wire: WireConfig, tensors: Mapping[str, torch.Tensor], tick_s: float) -> None:
    stop = drain_on_signals()
    faults = FaultInjector(name)
    engine = Engine(name, tensors, faults, tick_s)
    member = Member(id=name, host="localhost", version=-1, device="cpu")
    async with board_of(url, run) as board:
        receiver = WeightReceiver(faults.watching(board), board.store, member, specs_of(tensors), wire, lease_s=LEASE_S)
        tell(name, "begins")
        await run_with(
            stop.wait, weights=lambda: receiver.run(engine.swap), sample=engine.sample, faults=lambda: faults.listen(board)
        )
