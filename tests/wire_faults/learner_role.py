"""A learner that trains nothing: it packs one version after another and publishes them as the real one does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from async_rl.config import HEARTBEAT_S, WireConfig
from async_rl.supervision import drain_on_signals, run_with
from async_rl.transport.digest import digest_of
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.sender import WeightSender
from async_rl.types import VersionRecord
from buffer import open_buffer
from buffer.redis_buffer import RedisBuffer
from learner.versions.publish import PackedVersion, Publisher
from learner.versions.push_policy import PushPolicy
from tests.support.wire_board import board_of, config_of
from tests.support.wire_weights import held, open_rank_sender, weights
from tests.wire_faults.facts import tell
from tests.wire_faults.strike import FaultInjector
from tests.wire_faults.worker_role import ROWS

TICK_S = 0.02
STEP_S = (0.1, 0.5)
"""How long training a version would take: twice as long as its push, within these bounds. A crowd that is pushed to without a
pause has no time left to answer in.
"""


def main(*, name: str, url: str, run: str, wire: dict[str, Any]) -> None:
    asyncio.run(_live(name, url, run, WireConfig(**wire)))


async def _live(name: str, url: str, run: str, wire: WireConfig) -> None:
    stop = drain_on_signals()
    faults = FaultInjector(name)
    config = config_of(url, run)
    async with open_buffer(config) as buffer, board_of(url, run) as board:
        fence = await buffer.acquire(name, config.limits)
        tell(name, "begins", fence=fence)
        like = weights(0, rows=ROWS)
        rank_sender = open_rank_sender(board.stores, wire, like, fence=fence)
        async with WeightSender(faults.watching(board), wire, rank_sender, fence=fence) as sender:
            lateness = _Lateness()
            publisher = Publisher(buffer=_Watched(buffer, faults), fence=fence, sender=sender, policy=PushPolicy())
            await run_with(
                lambda: _train(name, buffer, fence, rank_sender, publisher, lateness, stop),
                lateness=lateness.run,
                hold=lambda: _hold(buffer, fence),
                publisher=publisher.run,
                faults=lambda: faults.listen(board),
            )
        rank_sender.close()
        await buffer.resign(fence)


class _Lateness:
    """Measures how late this process is scheduled on a busy machine."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """In all, so far."""

    async def run(self) -> None:
        """Service."""
        while True:
            slept = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.seconds += time.monotonic() - slept - TICK_S


class _Watched:
    def __init__(self, buffer: RedisBuffer, faults: FaultInjector) -> None:
        self._buffer, self._faults = buffer, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        self._faults.passes("staged")
        await self._buffer.publish(fence, record)
        tell("buffer", "live", version=record.version)
        self._faults.passes("published")


async def _train(
    name: str,
    buffer: RedisBuffer,
    fence: int,
    rank_sender: RankSender,
    publisher: Publisher,
    lateness: _Lateness,
    stop: asyncio.Event,
) -> None:
    recovery = await buffer.recover(fence, None)
    version = recovery.version
    while not stop.is_set():
        version = await buffer.issue(fence, after=version)
        tensors = weights(seed=version, rows=ROWS)
        tell(name, "packs", version=version, digest=digest_of(tensors))
        keep = publisher.versions_in_use
        await asyncio.to_thread(rank_sender.pack_parcel, version, held(tensors), keep=keep)
        packed = PackedVersion(version=version, timeline=f"t{fence}", step=version, digest=rank_sender.begin_digest(version))
        offered, late = time.monotonic(), lateness.seconds
        publisher.offer(packed, releases=version)
        await publisher.until_live(version)
        pushed = publisher.last_push
        assert pushed is not None
        tell(
            name,
            "live",
            version=version,
            seconds=round(time.monotonic() - offered, 3),
            late_s=round(lateness.seconds - late, 3),
            staged=pushed.report.staged,
            dropped=dict(pushed.report.dropped),
        )
        await asyncio.sleep(min(max(2 * pushed.report.seconds, STEP_S[0]), STEP_S[1]))


async def _hold(buffer: RedisBuffer, fence: int) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await buffer.hold(fence)
