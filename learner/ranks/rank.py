"""One rank of the learner: its part of the models, and what it trains, saves and sends them with."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from async_rl.protocols import GroupStores
from async_rl.supervision import working
from async_rl.transport.sending.rank_sender import RankSender
from learner.checkpoints.checkpointer import Checkpointer
from learner.model import TrainingModel
from learner.objective import Objective
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer


class Rank:
    """What every rank holds, rank 0 included. Orders (orders.py) act on it."""

    @working("the construction of the models")
    def __init__(
        self,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores | None,
        rendezvous: parallel.Rendezvous | None,
    ):
        """Blocks until all ranks have joined. `stores` is needed to send weights."""
        self.stores, self.wire, self.snapshots = stores, config.wire, config.snapshot_folder
        device = init_distributed(config, rendezvous)
        model_set = build_model_set(config, objective, shape)
        self.model = model_set.policy
        self.models: Mapping[str, TrainingModel] = model_set.trained
        """The trained models by name: the policy, and a separate critic if there is one."""
        self.trainer = RankTrainer(model_set, objective, config)
        self.checkpointer = Checkpointer(self.models, device)
        self.sender: RankSender | None = None

    def close_sender(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def close(self) -> None:
        """Wait for the checkpoint under way, then leave the process groups."""
        self.checkpointer.close()
        self.close_sender()
        parallel.shutdown()
