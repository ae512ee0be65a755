"""A learner of one rank, with a stopwatch between the phases of a step."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import HashStore

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import plan_layout
from async_rl.transport.sending.rank_orders import WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.types import TakenGroup
from learner.batches.batch import pack_batch, shard_from_bytes, shard_to_bytes
from learner.objective import Objective
from learner.packing.cost import cost_of
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer
from learner_parts.stopwatch import Stopwatch, WatchedModel

PHASES = ("pack", "ship", "rows", "forward", "loss", "backward", "optimizer", "weights")
"""Rollouts to packed rows, to bytes and back, to tensors; forward, loss, backward, optimizer; packing the weights."""


class OneRank:
    def __init__(self, config: Config, objective: Objective, shape: ModelShape) -> None:
        device = init_distributed(config)
        model_set = build_model_set(config, objective, shape)
        self._config, self._objective, self._cost = config, objective, cost_of(shape)
        self._watch = Stopwatch(device)
        watched: Any = WatchedModel(model_set.policy, self._watch)
        self._policy, self._device = model_set.policy, device
        self._trainer = RankTrainer(replace(model_set, policy=watched), objective, config)
        store = HashStore()
        layout = plan_layout(specs(shape, model_set.policy.dtype), {0: list(model_set.policy.held())})
        self._sender = RankSender(
            WireRendezvous.listening_at(config.wire.host, store), WireOrders(store, 0, fence=1), layout, 0, device, config.wire
        )
        self._version = 0

    def step(self, groups: Sequence[TakenGroup]) -> dict[str, float]:
        """Train one step and return the seconds of each phase."""
        watch = self._watch
        watch.start()
        batch = pack_batch(
            groups, objective=self._objective, capacity=self._config.batch.bin_tokens, cost=self._cost,
            minibatches=self._config.batch.minibatches,
        )  # fmt: skip
        watch.ends("pack")
        portions = shard_from_bytes(shard_to_bytes(batch, 0))
        watch.ends("ship")
        result = self._trainer.step(portions)
        assert not result.skipped
        watch.ends("optimizer")
        self._version += 1
        self._sender.pack_parcel(self._version, self._policy.held())
        self._sender.begin_digest(self._version)  # as in a run: beside the next step
        watch.ends("weights")
        return {phase: watch.seconds[phase] for phase in PHASES}

    @property
    def peak_memory_mb(self) -> float:
        """Peak memory of the GPU, or of the process without a GPU."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def close(self) -> None:
        parallel.shutdown()
