"""The orders that rank 0 broadcasts: each says what every rank does, rank 0 included.

All ranks apply the same orders in the same sequence. What can fail on one rank alone (reading files) ends with an all-reduce of
success, so that the ranks fail together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgpack
import structlog
import torch.distributed as dist
from pydantic import TypeAdapter

from async_rl.checkpoints.manifest import DamagedCheckpoint
from async_rl.errors import CheckpointError
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import Box, WireLayout, plan_layout, wire_specs
from async_rl.transport.sending.rank_orders import WIRE_ORDERS, WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire.rendezvous import WIRE_STORE, WireRendezvous
from learner.batches.batch import shard_from_bytes
from learner.checkpoints.stored_weights import stored_weights
from learner.checkpoints.writing import Written
from learner.collectives import broadcast_bytes, gather_bytes, true_on_all
from learner.ranks.rank import Rank
from learner.step import StepResult

log = structlog.get_logger()

T_co = TypeVar("T_co", covariant=True)
_HELD = TypeAdapter(list[Box])
_RANK_0 = {"rank_0": True}
"""Metadata of fields that are not broadcast: ranks above 0 use the default."""


class Order(Protocol[T_co]):
    def apply(self, rank: Rank) -> T_co:
        """Carry out the order on this rank. Collective."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    shards: Sequence[bytes]
    """One packed batch per data-parallel rank (batch.shard_to_bytes)."""
    learning_rate_scale: float

    def apply(self, rank: Rank) -> StepResult:
        for model in rank.models.values():
            model.learning_rate_scale = self.learning_rate_scale
        return rank.trainer.step(shard_from_bytes(self.shards[parallel_state.get_data_parallel_rank()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSender:
    """Prepare to send this rank's weights to workers. Once, before any version is packed."""

    fence: int

    def apply(self, rank: Rank) -> RankSender:
        assert rank.stores is not None
        index, store, host = dist.get_rank(), rank.stores.open(WIRE_STORE), rank.wire.host
        rendezvous = WireRendezvous.listening_at(host, store) if index == 0 else WireRendezvous.facing(host, store)
        orders = WireOrders(rank.stores.open(WIRE_ORDERS), index, fence=self.fence)
        rank.sender = RankSender(
            rendezvous, orders, _wire_layout(rank), index, rank.model.device, rank.wire, snapshots=rank.snapshots
        )
        if index > 0:
            rank.sender.follow_orders()
        return rank.sender


@dataclass(frozen=True, slots=True, kw_only=True)
class PackVersion:
    """Copy the current weights to be sent as `version`; training may continue. Returns RankSender.begin_digest's future."""

    version: int
    keep: Sequence[int]
    """Versions that stay packed."""

    def apply(self, rank: Rank) -> Future[str]:
        assert rank.sender is not None
        rank.sender.pack_parcel(self.version, rank.model.held(), keep=self.keep)
        return rank.sender.begin_digest(self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCheckpoint:
    """Pack the weights of a checkpoint as `version`. Returns as PackVersion does, or None if the checkpoint cannot be read."""

    version: int
    keep: Sequence[int]
    checkpoint: str

    def apply(self, rank: Rank) -> Future[str] | None:
        assert rank.sender is not None
        is_readable = True
        try:
            with stored_weights(Path(self.checkpoint), _served_shape(rank), rank.model) as held:
                rank.sender.pack_parcel(self.version, held, keep=self.keep)
        except (DamagedCheckpoint, CheckpointError) as error:
            is_readable = False
            log.warning(f"a checkpoint cannot be served: {error}")
        return rank.sender.begin_digest(self.version) if true_on_all(is_readable) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Begin a checkpoint: see Checkpointer.begin."""

    folder: str
    step: int
    keep: int
    life: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], metadata=_RANK_0)
    confirm: Callable[[], None] = field(default=lambda: None, metadata=_RANK_0)

    def apply(self, rank: Rank) -> Future[Written]:
        return rank.checkpointer.begin(
            Path(self.folder), step=self.step, extra=self.extra, keep=self.keep, life=self.life, confirm=self.confirm
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """Restore the first undamaged one of these checkpoints. Returns its `extra`, or None if there are none."""

    folder: str
    names: Sequence[str]

    def apply(self, rank: Rank) -> dict[str, Any] | None:
        return rank.checkpointer.load(Path(self.folder), self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Do nothing: keeps the wait of the other ranks within the time limit of a collective."""

    def apply(self, rank: Rank) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End ranks above 0."""

    def apply(self, rank: Rank) -> None: ...


_ORDERS: Mapping[str, type[Order[Any]]] = {
    each.__name__: each
    for each in (TrainStep, OpenSender, PackVersion, PackCheckpoint, SaveCheckpoint, LoadCheckpoint, KeepAlive, Stop)
}


def send_order(order: Order[Any]) -> None:
    """Broadcast an order from rank 0. Blocks until the other ranks receive it."""
    if dist.get_world_size() > 1:
        values = {each.name: getattr(order, each.name) for each in fields(order) if each.metadata != _RANK_0}  # pyright: ignore[reportArgumentType]
        broadcast_bytes(msgpack.packb([type(order).__name__, values]))


def receive_order() -> Order[Any]:
    """Block until rank 0 broadcasts an order."""
    name, values = msgpack.unpackb(broadcast_bytes(None))
    return _ORDERS[name](**values)


def _wire_layout(rank: Rank) -> WireLayout:
    """Return the layout of the weights over all ranks, the same on every rank. Collective."""
    held = [_HELD.validate_json(boxes) for boxes in gather_bytes(_HELD.dump_json(list(rank.model.held())))]
    if dist.get_rank() > 0:
        return WireLayout.from_json(broadcast_bytes(None))
    wanted = wire_specs(specs(_served_shape(rank), rank.model.dtype), rank.wire.dtype)
    layout = plan_layout(wanted, dict(enumerate(held)))
    broadcast_bytes(layout.to_json())
    return layout


def _served_shape(rank: Rank) -> ModelShape:
    """The shape of what workers receive: without a shared critic's value head."""
    return replace(rank.model.shape, head="tokens")
