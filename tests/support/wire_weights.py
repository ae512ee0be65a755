"""Small sets of weights that have every kind of tensor a model may have, and a learner reduced to its end of the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from async_rl.config import WireConfig
from async_rl.protocols import GroupStores
from async_rl.transport.digest import specs_of
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.sending.rank_orders import WIRE_ORDERS, WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.sending.sender import PushReport, WeightSender
from async_rl.transport.wire.rendezvous import WIRE_STORE, WireRendezvous
from async_rl.types import VersionRecord
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.wire_board import StageBoard

Weights = dict[str, torch.Tensor]


def weights(seed: int, rows: int = 4000) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(rows, 1000, generator=generator),
        "layers.0.norm": torch.randn(64, generator=generator),
        "layers.0.bias": torch.randn(7, 5, generator=generator).bfloat16(),
        "layers.0.tied": torch.randn(300, 300, generator=generator).t(),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.empty(0, 8),
        "steps": torch.randint(1 << 40, (3,), generator=generator),
    }


def held(tensors: Mapping[str, torch.Tensor]) -> dict[Box, torch.Tensor]:
    """As a learner of one rank holds them."""
    return {Box.whole(spec): tensors[spec.name] for spec in specs_of(tensors)}


class Sender:
    """A learner of one rank that is told what to send."""

    def __init__(self, sender: WeightSender, rank_sender: RankSender, timeline: str) -> None:
        self._sender, self.rank_sender, self._timeline = sender, rank_sender, timeline
        self.wait_for_members_behind, self.members_behind = sender.wait_for_members_behind, sender.members_behind
        self.records: dict[int, VersionRecord] = {}

    def pack(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        keep = [*self.records]
        self.rank_sender.pack_parcel(version, held(tensors), keep=keep)
        digest = self.rank_sender.begin_digest(version).result(PATIENCE_S)
        self.records[version] = VersionRecord(version=version, timeline=self._timeline, step=version, digest=digest)

    def flip_a_bit(self, version: int) -> None:
        """Corrupt packed weights without updating their digests."""
        self.rank_sender.parcel(version)[5] ^= 1

    async def push(self, version: int, tensors: Mapping[str, torch.Tensor]) -> PushReport:
        if version not in self.records:
            self.pack(version, tensors)
        return await self._sender.push(self.records[version])

    async def flip(self, version: int) -> None:
        await self._sender.flip(self.records[version])


def open_rank_sender(
    stores: GroupStores, wire: WireConfig, like: Mapping[str, torch.Tensor], *, fence: int = 1, snapshots: Path | None = None
) -> RankSender:
    """A learner of one rank. `like`: what every version's weights look like."""
    layout = plan_layout(specs_of(like), {0: list(held(like))})
    rendezvous = WireRendezvous.listening_at(wire.host, stores.open(WIRE_STORE))
    orders = WireOrders(stores.open(WIRE_ORDERS), 0, fence=fence)
    return RankSender(rendezvous, orders, layout, 0, torch.device("cpu"), wire, snapshots=snapshots)


@asynccontextmanager
async def sending(
    board: StageBoard,
    wire: WireConfig,
    like: Mapping[str, torch.Tensor],
    *,
    fence: int | None = None,
    timeline: str = "a",
    snapshots: Path | None = None,
) -> AsyncIterator[Sender]:
    """`like`: what every version's weights look like. Without `fence`: that of the current learner, or 1."""
    current = await board.fence()
    if fence is None:
        fence = current if current is not None else 1
    if fence != current:
        await board.take_over(fence)
    rank_sender = open_rank_sender(board.stores, wire, like, fence=fence, snapshots=snapshots)
    async with WeightSender(board, wire, rank_sender, fence=fence) as sender:
        yield Sender(sender, rank_sender, timeline)
    rank_sender.close()


async def all_behind(sender: WeightSender | Sender, version: int, names: Collection[str]) -> None:
    """Wait until all of these members are known not to hold that version."""

    async def are_behind() -> bool:
        return set(await sender.wait_for_members_behind(version)) >= set(names)

    await eventually(are_behind, f"members {', '.join(names)} are behind version {version}")
