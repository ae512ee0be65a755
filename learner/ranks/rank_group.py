"""How one rank leads the others. Rank 0 alone talks to the buffer; the rest do what it says, in the order it says it. They use
Redis for two things only: the addresses of process groups, and errands of the weight wire.

    rank 0    RankGroup.step(batch) ──▶ broadcast(STEP, shards) ──▶ RankTrainer.step ──▶ result
    rank 1+   follow()         ──▶ receive                 ──▶ RankTrainer.step ──▶ receive ...

Orders are broadcast over the world's group with CPU tensors (gloo, also where gradients go over NCCL). What can fail on one
rank alone, reading files, ends with an all-reduce of success, so that the ranks fail together. Checkpoints are written beside
all this (learner/checkpoints/writing.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import structlog
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from async_rl.checkpoints.manifest import DamagedCheckpoint, candidates
from async_rl.config import Config
from async_rl.errors import CheckpointError
from async_rl.megatron import parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.megatron.value_head import without_value_head
from async_rl.models.shape import ModelShape
from async_rl.protocols import GroupStores
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.plan import Box, WireLayout, lay_out, on_the_wire
from async_rl.transport.sending.rank_orders import WIRE_ORDERS, WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire.rendezvous import STORE, WireRendezvous
from learner.batches.batch import PackedBatch, shard_from_bytes, shard_to_bytes
from learner.checkpoints.checkpointer import Checkpointer, all_succeeded
from learner.checkpoints.stored_weights import stored_weights
from learner.checkpoints.writing import Written
from learner.lost_peers import naming_lost_peers
from learner.model import TrainingModel
from learner.objective import Objective
from learner.ranks.collectives import broadcast_bytes, gather_bytes
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer
from learner.step import StepResult

log = structlog.get_logger()

_HELD = TypeAdapter(list[Box])
_PACKED: TypeAdapter[PackedParcel | None] = TypeAdapter(PackedParcel | None)


class Order(IntEnum):
    STEP = 0
    GATHER = 1
    SAVE = 2
    LOAD = 3
    IDLE = 4
    STOP = 5
    OPEN_DEPOT = 6
    PACK = 7
    PACK_STORED = 8


class RankGroup:
    """All learner ranks at once, as rank 0 sees them. Every method blocks; all belong on the thread that made it."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores | None = None,
        rendezvous: parallel.Rendezvous | None = None,
    ):
        """`stores`: needed for `open_depot`."""
        self._rank = _Rank(config, objective, shape, stores, rendezvous)
        self._obeys = True

    @property
    def model(self) -> TrainingModel:
        """Rank 0's part."""
        return self._rank.model

    @property
    def models(self) -> Mapping[str, TrainingModel]:
        """Rank 0's part of all that learn: the policy, perhaps a critic."""
        return self._rank.models

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_shards(self) -> int:
        """How many ways a batch must be divided."""
        return self.model.layout.data

    def step(self, batch: PackedBatch, *, learning_rate_scale: float = 1.0) -> StepResult:
        """`learning_rate_scale` is what the schedule's learning rate is multiplied with."""
        if batch.num_shards != self.num_shards:
            raise ValueError(f"the batch has {batch.num_shards} shards for {self.num_shards} data-parallel ranks")
        shards = [shard_to_bytes(batch, shard) for shard in range(batch.num_shards)]
        told = {"shards": shards, "learning_rate_scale": learning_rate_scale}
        with self._told(Order.STEP, told):
            result = self._rank.step(**told)
        return replace(result, metrics={**batch.metrics, **result.metrics})

    def gather(self) -> dict[str, Tensor]:
        """A snapshot of the full weights, which training on does not change."""
        with self._told(Order.GATHER):
            gathered = self._rank.gather()
        assert gathered is not None
        return gathered

    def open_depot(self, *, fence: int) -> RankSender:
        """Every rank gets ready to send what it holds to the workers. Once in a rank group's life, before `pack`."""
        with self._told(Order.OPEN_DEPOT, {"fence": fence}):
            return self._rank.open_depot(fence)

    def pack(self, version: int, keep: Collection[int]) -> str:
        """Every rank copies what it sends of the weights of now; training on does not change it. Returns the digest."""
        with self._told(Order.PACK, {"version": version, "keep": sorted(keep)}):
            return self._rank.pack(version, keep)

    def pack_stored(self, version: int, keep: Collection[int], checkpoint: Path) -> str | None:
        """The same with the weights of a checkpoint; None when it cannot be read."""
        with self._told(Order.PACK_STORED, {"version": version, "keep": sorted(keep), "checkpoint": str(checkpoint)}):
            return self._rank.pack_stored(version, keep, checkpoint)

    def save(
        self,
        folder: Path,
        *,
        step: int,
        extra: Mapping[str, Any],
        keep: int,
        life: int = 0,
        confirm: Callable[[], None] = lambda: None,
    ) -> Future[Written]:
        """All ranks do what `Checkpointer.begin` says."""
        told = {"folder": str(folder), "step": step, "life": life, "keep": keep}
        with self._told(Order.SAVE, told):
            return self._rank.checkpointer.begin(folder, step=step, extra=extra, keep=keep, life=life, confirm=confirm)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Go on from the newest checkpoint that is whole. Returns its `extra`; None where there is no checkpoint."""
        found = [path.name for path in candidates(folder)]
        with self._told(Order.LOAD, {"folder": str(folder), "found": found}):
            return self._rank.checkpointer.load(folder, found)

    def idle(self) -> None:
        """Tell the others that all is well, before their wait for an order runs into its time limit."""
        with self._told(Order.IDLE):
            pass

    def stop(self) -> None:
        """Let the others end. Nothing may be asked of the rank group afterwards."""
        if self._obeys:
            _send(Order.STOP)
        self._rank.close()

    @contextmanager
    def _told(self, order: Order, told: object = None) -> Iterator[None]:
        """After a failure the others have failed too, or wait for what will not come: leaving the group ends them."""
        try:
            _send(order, told)
            yield
        except BaseException:
            self._obeys = False
            raise


def follow(
    config: Config,
    objective: Objective,
    shape: ModelShape,
    stores: GroupStores | None = None,
    rendezvous: parallel.Rendezvous | None = None,
) -> None:
    """The whole life of a rank above 0.

    consumes: orders      waits for:    rank 0
    produces: nothing     unblocked by: an order (IDLE, at the least, well within parallel.GROUP_TIMEOUT); rank 0's death
    """
    # Launchers signal every rank; rank 0 alone decides how the run ends, and needs the others for its last checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = _Rank(config, objective, shape, stores, rendezvous)
    try:
        with naming_lost_peers():
            _obey(rank)
    finally:
        rank.close_depot()
    rank.close()


def _obey(rank: _Rank) -> None:
    while (received := _receive())[0] is not Order.STOP:
        order, told = received
        if order is Order.STEP:
            rank.step(**told)
        elif order is Order.GATHER:
            rank.gather()
        elif order is Order.OPEN_DEPOT:
            rank.open_depot(told["fence"]).follow()
        elif order is Order.PACK:
            rank.pack(told["version"], told["keep"])
        elif order is Order.PACK_STORED:
            rank.pack_stored(told["version"], told["keep"], Path(told["checkpoint"]))
        elif order is Order.SAVE:
            rank.checkpointer.begin(Path(told["folder"]), step=told["step"], extra={}, keep=told["keep"], life=told["life"])
        elif order is Order.LOAD:
            rank.checkpointer.load(Path(told["folder"]), told["found"])


class _Rank:
    """What every rank does, rank 0 included."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores | None,
        rendezvous: parallel.Rendezvous | None,
    ):
        self._stores = stores
        device = init_distributed(config, rendezvous)
        model_set = build_model_set(config, objective, shape)
        self.model = model_set.policy
        self._wire, self._snapshots = config.wire, config.snapshot_folder
        self._trainer = RankTrainer(model_set, objective, config)
        self.checkpointer = Checkpointer(self.models, device)
        self._depot: RankSender | None = None

    @property
    def models(self) -> Mapping[str, TrainingModel]:
        """All that learn, the policy and perhaps a critic."""
        return self._trainer.models

    def step(self, shards: list[bytes], learning_rate_scale: float) -> StepResult:
        for model in self.models.values():
            model.learning_rate_scale = learning_rate_scale
        return self._trainer.step(shard_from_bytes(shards[parallel_state.get_data_parallel_rank()]))

    def gather(self) -> dict[str, Tensor] | None:
        """Without what a critic adds to the policy's layers."""
        gathered = self.model.gather()
        return without_value_head(gathered) if gathered is not None else None

    def open_depot(self, fence: int) -> RankSender:
        assert self._stores is not None
        rank, store = dist.get_rank(), self._stores.open(STORE)
        host = self._wire.host
        meeting = WireRendezvous.at(host, store) if rank == 0 else WireRendezvous.towards(host, store)
        errands = WireOrders(self._stores.open(WIRE_ORDERS), rank, fence=fence)
        self._depot = RankSender(
            meeting, errands, self._layout(), rank, self.model.device, self._wire, snapshots=self._snapshots
        )
        return self._depot

    def _layout(self) -> WireLayout:
        """The same on all ranks, made of what each of them holds."""
        held = [_HELD.validate_json(said) for said in gather_bytes(_HELD.dump_json(list(self.model.held())))]
        if not held:
            return WireLayout.from_json(broadcast_bytes(None))
        wanted = on_the_wire(specs(self._served_shape, self.model.dtype), self._wire.dtype)
        layout = lay_out(wanted, dict(enumerate(held)))
        broadcast_bytes(layout.to_json())
        return layout

    def pack(self, version: int, keep: Collection[int]) -> str:
        """Returns the digest; empty on ranks above 0."""
        assert self._depot is not None
        return self._complete(version, self._depot.pack(version, self.model.held(), keep=keep), keep)

    def pack_stored(self, version: int, keep: Collection[int], checkpoint: Path) -> str | None:
        assert self._depot is not None
        packed = problem = None
        try:
            with stored_weights(checkpoint, self._served_shape, self.model.held().keys()) as held:
                packed = self._depot.pack(version, held, keep=keep)
        except (DamagedCheckpoint, CheckpointError) as error:
            problem = error
            log.warning(f"a checkpoint cannot be served: {error}")
        return self._complete(version, packed, keep) if all_succeeded(problem is None) else None

    def _complete(self, version: int, packed: PackedParcel | None, keep: Collection[int]) -> str:
        assert self._depot is not None
        said = [_PACKED.validate_json(each) for each in gather_bytes(_PACKED.dump_json(packed))]
        return self._depot.complete(version, said, keep=keep) if said else ""

    @property
    def _served_shape(self) -> ModelShape:
        """Without what a critic adds."""
        return replace(self.model.shape, head="tokens")

    def close(self) -> None:
        self.checkpointer.close()
        self.close_depot()
        parallel.shutdown()

    def close_depot(self) -> None:
        if self._depot is not None:
            self._depot.close()
            self._depot = None


# -- between ranks --------------------------------------------------------------------------------------------------------


def _send(order: Order, told: object = None) -> None:
    if dist.get_world_size() > 1:
        broadcast_bytes(msgpack.packb([order, told]))


def _receive() -> tuple[Order, Any]:
    order, told = msgpack.unpackb(broadcast_bytes(None))
    return Order(order), told
