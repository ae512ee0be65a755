"""The rank group: all ranks of the learner, led by rank 0.

    rank 0    RankGroup.pack_version(...) ──▶ broadcast ──▶ runs it ──▶ result
    rank 1+   follow()                    ──▶ receive   ──▶ runs it ──▶ receive ...

Rank 0 alone talks to the buffer; the others apply the orders that it broadcasts: methods marked with `@order`, with their
arguments. They use Redis for two things only: the addresses of process groups, and the orders of the weight wire. Orders are
broadcast over the world's group with CPU tensors (gloo, also if gradients use NCCL). Checkpoints are written in the background
(learner/checkpoints/writing.py).

All ranks apply the same orders in the same sequence. What can fail on one rank alone (reading files) ends with an all-reduce of
success, so that the ranks fail together.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgpack
import structlog
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from async_rl.checkpoints.manifest import DamagedCheckpoint, candidates
from async_rl.config import Config
from async_rl.errors import CheckpointError
from async_rl.megatron import parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.protocols import GroupStores
from async_rl.supervision import working
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.plan import Box, WireLayout, plan_layout, wire_specs
from async_rl.transport.sending.rank_orders import WIRE_ORDERS, WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire.rendezvous import WIRE_STORE, WireRendezvous
from learner.batches.batch import PackedBatch, shard_from_bytes, shard_to_bytes
from learner.checkpoints.checkpointer import Checkpointer
from learner.checkpoints.stored_weights import stored_weights
from learner.checkpoints.writing import Written
from learner.collectives import broadcast_bytes, gather_bytes, true_on_all
from learner.lost_peers import naming_lost_peers
from learner.objective import Objective
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer
from learner.step import StepResult

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
_HELD = TypeAdapter(list[Box])
_PACKED: TypeAdapter[PackedParcel | None] = TypeAdapter(PackedParcel | None)
_STOP = "stop"
_RANK_0_ONLY = ("extra", "confirm")
"""Arguments that are not broadcast: ranks above 0 use the default."""

_orders: dict[str, Callable[..., object]] = {}


def order(act: Callable[Concatenate[RankGroup, P], T]) -> Callable[Concatenate[RankGroup, P], T]:
    """Make a collective method an order: called on rank 0, it runs on all ranks. Returns rank 0's result.

    The other ranks receive paths as text and sets as lists. After an exception no order may follow: the other ranks failed too,
    or end when rank 0 leaves the process group.
    """
    name, act = act.__name__, working(f"the order {act.__name__.strip('_')}")(act)
    _orders[name] = act

    @wraps(act)
    def on_all_ranks(group: RankGroup, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            _broadcast(name, args, {key: value for key, value in kwargs.items() if key not in _RANK_0_ONLY})
            return act(group, *args, **kwargs)
        except BaseException:
            group.has_failed = True
            raise

    return on_all_ranks


def _broadcast(name: str, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None) -> None:
    """Broadcast an order from rank 0. Blocks until the other ranks receive it."""
    if dist.get_world_size() > 1:
        broadcast_bytes(msgpack.packb([name, args, kwargs], default=_plain))


def _plain(value: Any) -> object:
    return str(value) if isinstance(value, Path) else sorted(value)


class RankGroup:
    """One rank's place in the group. Every method blocks, and must be called on the thread that constructed it.

    Rank 0 calls the methods; the other ranks `follow`.
    """

    @working("the construction of the models")
    def __init__(
        self,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores | None = None,
        rendezvous: parallel.Rendezvous | None = None,
    ):
        """Blocks until all ranks have joined. `stores` is needed for `open_sender`."""
        self._stores, self._wire, self._snapshots = stores, config.wire, config.snapshot_folder
        device = init_distributed(config, rendezvous)
        model_set = build_model_set(config, objective, shape)
        self.model = model_set.policy
        """This rank's part of the policy."""
        self.models = model_set.trained
        """The trained models by name: the policy, and a separate critic if there is one."""
        self._trainer = RankTrainer(model_set, objective, config)
        self._checkpointer = Checkpointer(self.models, device)
        self._sender: RankSender | None = None
        self.has_failed = False

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_shards(self) -> int:
        """The number of data-parallel shards of a batch."""
        return self.model.layout.data

    def step(self, batch: PackedBatch, *, learning_rate_scale: float = 1.0) -> StepResult:
        """Train one step. `learning_rate_scale` is a factor on the schedule's learning rate."""
        if batch.num_shards != self.num_shards:
            raise ValueError(f"the batch has {batch.num_shards} shards for {self.num_shards} data-parallel ranks")
        result = self._train([shard_to_bytes(batch, shard) for shard in range(batch.num_shards)], learning_rate_scale)
        return replace(result, metrics={**batch.metrics, **result.metrics})

    @order
    def _train(self, shards: Sequence[bytes], learning_rate_scale: float) -> StepResult:
        for model in self.models.values():
            model.learning_rate_scale = learning_rate_scale
        return self._trainer.step(shard_from_bytes(shards[parallel_state.get_data_parallel_rank()]))

    # -- weights for workers --------------------------------------------------------------------------------------------------

    @order
    def open_sender(self, *, fence: int) -> RankSender:
        """Prepare to send this rank's weights to workers. Once, before `pack_version`."""
        assert self._stores is not None
        index, store, host = dist.get_rank(), self._stores.open(WIRE_STORE), self._wire.host
        rendezvous = WireRendezvous.listening_at(host, store) if index == 0 else WireRendezvous.facing(host, store)
        orders = WireOrders(self._stores.open(WIRE_ORDERS), index, fence=fence)
        self._sender = RankSender(
            rendezvous, orders, self._wire_layout(), index, self.device, self._wire, snapshots=self._snapshots
        )
        if index > 0:
            self._sender.follow_orders()
        return self._sender

    @order
    def pack_version(self, version: int, keep: Collection[int]) -> str:
        """Copy the current weights to be sent, keeping the versions `keep`; training may continue. Returns the digest."""
        assert self._sender is not None
        return self._register(version, self._sender.pack_parcel(version, self.model.held(), keep=keep), keep)

    @order
    def pack_checkpoint(self, version: int, keep: Collection[int], checkpoint: Path) -> str | None:
        """Pack the weights of a checkpoint instead. Returns None if it cannot be read."""
        assert self._sender is not None
        packed, is_readable = None, True
        try:
            with stored_weights(Path(checkpoint), self._served_shape, self.model.held().keys()) as held:
                packed = self._sender.pack_parcel(version, held, keep=keep)
        except (DamagedCheckpoint, CheckpointError) as error:
            is_readable = False
            log.warning(f"a checkpoint cannot be served: {error}")
        return self._register(version, packed, keep) if true_on_all(is_readable) else None

    def _register(self, version: int, packed: PackedParcel | None, keep: Collection[int]) -> str:
        """Gather the parcels of all ranks; return the digest on rank 0, an empty string elsewhere. Collective."""
        assert self._sender is not None
        parcels = [_PACKED.validate_json(parcel) for parcel in gather_bytes(_PACKED.dump_json(packed))]
        return self._sender.register_version(version, parcels, keep=keep) if dist.get_rank() == 0 else ""

    def _wire_layout(self) -> WireLayout:
        """Return the layout of the weights over all ranks, the same on every rank. Collective."""
        held = [_HELD.validate_json(boxes) for boxes in gather_bytes(_HELD.dump_json(list(self.model.held())))]
        if dist.get_rank() > 0:
            return WireLayout.from_json(broadcast_bytes(None))
        wanted = wire_specs(specs(self._served_shape, self.model.dtype), self._wire.dtype)
        layout = plan_layout(wanted, dict(enumerate(held)))
        broadcast_bytes(layout.to_json())
        return layout

    @property
    def _served_shape(self) -> ModelShape:
        """The shape of what workers receive: without a shared critic's value head."""
        return replace(self.model.shape, head="tokens")

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    @order
    def save(
        self,
        folder: Path,
        *,
        step: int,
        keep: int,
        life: int = 0,
        extra: Mapping[str, Any] = {},
        confirm: Callable[[], None] = lambda: None,
    ) -> Future[Written]:
        """Begin a checkpoint: see Checkpointer.begin."""
        return self._checkpointer.begin(Path(folder), step=step, extra=extra, keep=keep, life=life, confirm=confirm)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore the newest undamaged checkpoint and return its `extra`; None if there is no checkpoint."""
        return self._load(folder, [path.name for path in candidates(folder)])

    @order
    def _load(self, folder: Path, names: Sequence[str]) -> dict[str, Any] | None:
        return self._checkpointer.load(Path(folder), names)

    # -- waiting and ending ---------------------------------------------------------------------------------------------------

    @order
    def idle(self) -> None:
        """Keep the other ranks waiting: call it well within parallel.GROUP_TIMEOUT of the last order."""

    def follow(self) -> None:
        """Apply rank 0's orders until it stops. Raises ServiceStopped if another rank is lost.

        consumes: orders      waits for:    rank 0
        produces: nothing     unblocked by: an order (idle, at the least, well within GROUP_TIMEOUT); rank 0's death
        """
        try:
            with naming_lost_peers():
                while (received := msgpack.unpackb(broadcast_bytes(None)))[0] != _STOP:
                    name, args, kwargs = received
                    _orders[name](self, *args, **kwargs)
        finally:
            self._close_sender()
        self._leave()

    def stop(self) -> None:
        """End the other ranks and leave the process groups. No call may follow."""
        if not self.has_failed:
            _broadcast(_STOP)
        self._leave()

    def _leave(self) -> None:
        """Wait for the checkpoint under way, then leave the process groups."""
        self._checkpointer.close()
        self._close_sender()
        parallel.shutdown()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def follow(
    config: Config,
    objective: Objective,
    shape: ModelShape,
    stores: GroupStores | None = None,
    rendezvous: parallel.Rendezvous | None = None,
) -> None:
    """Run a rank above 0 until rank 0 stops it. Raises ServiceStopped if another rank is lost."""
    # Launchers signal every rank; rank 0 alone decides how the run ends, and needs the others for its last checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    RankGroup(config, objective, shape, stores, rendezvous).follow()
