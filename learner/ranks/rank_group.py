"""The rank group: all ranks of the learner, led by rank 0.

    rank 0    RankGroup.run(order) ──▶ broadcast ──▶ order.apply(rank) ──▶ result
    rank 1+   follow()             ──▶ receive   ──▶ order.apply(rank) ──▶ receive ...

Rank 0 alone talks to the buffer; the others apply the orders that it broadcasts (orders.py). They use Redis for two things
only: the addresses of process groups, and the orders of the weight wire. Orders are broadcast over the world's group with CPU
tensors (gloo, also if gradients use NCCL). Checkpoints are written in the background (learner/checkpoints/writing.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from async_rl.checkpoints.manifest import candidates
from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from async_rl.protocols import GroupStores
from async_rl.supervision import working
from learner.batches.batch import PackedBatch, shard_to_bytes
from learner.checkpoints.writing import Written
from learner.lost_peers import naming_lost_peers
from learner.model import TrainingModel
from learner.objective import Objective
from learner.ranks.orders import LoadCheckpoint, Order, SaveCheckpoint, Stop, TrainStep, receive_order, send_order
from learner.ranks.rank import Rank
from learner.step import StepResult

T = TypeVar("T")


class RankGroup:
    """All ranks as rank 0 sees them. Every method blocks, and must be called on the thread that constructed it."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores | None = None,
        rendezvous: parallel.Rendezvous | None = None,
    ):
        """`stores` is needed for the order OpenSender."""
        self._rank = Rank(config, objective, shape, stores, rendezvous)
        self._has_failed = False

    @property
    def model(self) -> TrainingModel:
        """Rank 0's part of the policy."""
        return self._rank.model

    @property
    def models(self) -> Mapping[str, TrainingModel]:
        """Rank 0's part of the trained models."""
        return self._rank.models

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_shards(self) -> int:
        """The number of data-parallel shards of a batch."""
        return self.model.layout.data

    def run(self, order: Order[T]) -> T:
        """Apply an order on all ranks and return rank 0's result.

        After an exception no order may follow: the other ranks failed too, or end when rank 0 leaves the process group.
        """
        try:
            with working(_name(order)):
                send_order(order)
                return order.apply(self._rank)
        except BaseException:
            self._has_failed = True
            raise

    def step(self, batch: PackedBatch, *, learning_rate_scale: float = 1.0) -> StepResult:
        """Train one step. `learning_rate_scale` is a factor on the schedule's learning rate."""
        if batch.num_shards != self.num_shards:
            raise ValueError(f"the batch has {batch.num_shards} shards for {self.num_shards} data-parallel ranks")
        shards = [shard_to_bytes(batch, shard) for shard in range(batch.num_shards)]
        result = self.run(TrainStep(shards=shards, learning_rate_scale=learning_rate_scale))
        return replace(result, metrics={**batch.metrics, **result.metrics})

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
        """Begin a checkpoint: see Checkpointer.begin."""
        return self.run(SaveCheckpoint(folder=str(folder), step=step, extra=extra, keep=keep, life=life, confirm=confirm))

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore the newest undamaged checkpoint and return its `extra`; None if there is no checkpoint."""
        return self.run(LoadCheckpoint(folder=str(folder), names=[path.name for path in candidates(folder)]))

    def stop(self) -> None:
        """End the other ranks and leave the process groups. No call may follow."""
        if not self._has_failed:
            send_order(Stop())
        self._rank.close()


def follow(
    config: Config,
    objective: Objective,
    shape: ModelShape,
    stores: GroupStores | None = None,
    rendezvous: parallel.Rendezvous | None = None,
) -> None:
    """Run a rank above 0 until rank 0 stops it. Raises ServiceStopped if another rank is lost.

    consumes: orders      waits for:    rank 0
    produces: nothing     unblocked by: an order (KeepAlive, at the least, well within parallel.GROUP_TIMEOUT); rank 0's death
    """
    # Launchers signal every rank; rank 0 alone decides how the run ends, and needs the others for its last checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = Rank(config, objective, shape, stores, rendezvous)
    try:
        with naming_lost_peers():
            while not isinstance(order := receive_order(), Stop):
                with working(_name(order)):
                    order.apply(rank)
    finally:
        rank.close_sender()
    rank.close()


def _name(order: Order[Any]) -> str:
    return f"the order {type(order).__name__}"
