"""A learner of one rank reduced to its end of the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from async_rl.config import WireConfig
from async_rl.transport.digest import specs_of
from async_rl.transport.plan import plan_layout
from async_rl.transport.sending.rank_orders import WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.sender import WeightSender
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.types import VersionRecord
from weights_parts.models import held
from weights_parts.pipe_board import FENCE, PipeBoard


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    record: VersionRecord
    workers: tuple[str, ...]
    pack_s: float
    """Learner time for copying what it sends: training waits for it."""
    digest_s: float
    """Time for hashing the copy, beside training."""
    push_s: float
    """From the offer until all workers hold it staged and verified."""


class Learner:
    def __init__(self, sender: WeightSender, rank_sender: RankSender, wire: WireConfig) -> None:
        self._sender = sender
        self._has_deltas = wire.deltas != "off"
        self._rank_sender = rank_sender
        self._version = -1

    async def push(self, weights: Mapping[str, torch.Tensor], *, workers: int) -> Pushed:
        """Push the next version, once `workers` are listed."""
        self._version += 1
        while len(await self._sender.wait_for_members_behind(self._version)) < workers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        started = time.perf_counter()
        self._rank_sender.pack_parcel(self._version, held(weights), keep=[self._version - 1] if self._has_deltas else ())
        pack_s = time.perf_counter() - started
        digest = await asyncio.wrap_future(self._rank_sender.begin_digest(self._version))
        digest_s = time.perf_counter() - started - pack_s
        record = VersionRecord(version=self._version, timeline="", step=self._version, digest=digest)
        report = await self._sender.push(record)
        assert len(report.staged) == workers, report
        return Pushed(record=record, workers=report.staged, pack_s=pack_s, digest_s=digest_s, push_s=report.seconds)

    @property
    def num_deltas(self) -> int:
        return self._rank_sender.num_deltas

    async def flip(self, pushed: Pushed) -> None:
        await self._sender.flip(pushed.record)


@asynccontextmanager
async def learner(board: PipeBoard, wire: WireConfig, like: Mapping[str, torch.Tensor]) -> AsyncIterator[Learner]:
    """`like`: what every version's weights look like, and where they are."""
    device = next(iter(like.values())).device
    store = await board.make_store()
    layout = plan_layout(specs_of(like), {0: list(held(like))})
    rank_sender = RankSender(
        WireRendezvous.listening_at("127.0.0.1", store), WireOrders(store, 0, fence=FENCE), layout, 0, device, wire
    )
    async with asyncio.TaskGroup() as services:
        listening = services.create_task(board.listen())
        async with WeightSender(board, wire, rank_sender, fence=FENCE) as sender:
            yield Learner(sender, rank_sender, wire)
        listening.cancel()
    rank_sender.close()
