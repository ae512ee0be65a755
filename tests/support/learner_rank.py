"""A learner small enough for a test, and what one of two ranks does under each layout."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import Config
from async_rl.errors import boundary
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import table
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from learner.batches.batch import PackedBatch, pack_batch
from learner.objective import Objective
from learner.ranks.orders import KeepAlive
from learner.ranks.rank_group import RankGroup, follow
from tests.support.full_weights import weights_of

CPU = torch.device("cpu")
VOCABULARY = 21
LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "data": {}}
STEPS, SAVED_AT = 5, 3
OBJECTIVE = Objective.model_validate(
    {
        "policy_loss": {
            "surrogate": {"type": "ppo_clip", "clip_high": 0.2},
            "aggregation": "prompt_mean",
            "trust_mask": "tv",
            "veto": {},
        }
    }
)


def config(
    *,
    hidden: int = 32,
    layers: int = 2,
    experts: int | None = None,
    clip_grad: float = 0.2,
    epochs: int = 1,
    tied: bool = True,
    recompute: str = "none",
    logits_gb: float = 2.0,
    precision: str = "auto",
    lora: dict[str, Any] | None = None,
    router: dict[str, float] | None = None,
    **parallel: Any,
) -> Config:
    optimizer = {
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "decay": "cosine",
        "weight_decay": 0.1,
        "clip_grad": clip_grad,
        # well above rounding: Adam would blow up what layouts make of gradients that are almost 0
        "eps": 1e-4,
    }
    size: dict[str, Any] = {"hidden": hidden, "layers": layers, "heads": 4, "kv_heads": 2, "ffn": 48, "tied_embeddings": tied}
    if experts is not None:
        size["experts"] = {"number": experts, "per_token": 2, "ffn": 16, "every": 2}
    learner = {
        "steps": 20,
        "optimizer": optimizer,
        "lora": lora,
        "experts": router if router is not None else {},
        "parallel": parallel,
        "recompute": recompute,
        "logits_gb": logits_gb,
        "precision": precision,
    }
    return Config.model_validate(
        {
            "model": {"size": size},
            "environments": [{"type": "even_digits"}],
            "sampling": {"temperature": 0.9},
            "batch": {"epochs": epochs},
            "learner": learner,
        }
    )


def shape(of: Config) -> ModelShape:
    return model_shape(of.model, VOCABULARY)


def batch(step: int, num_shards: int, capacity: int = 40) -> PackedBatch:
    return pack_batch(taken_groups(step), objective=OBJECTIVE, capacity=capacity, num_shards=num_shards)


def taken_groups(step: int) -> list[TakenGroup]:
    """Ragged groups that fill several bins; every second step has so little that a second shard goes hungry."""
    rng = np.random.default_rng(step)
    return [_group(rng, siblings=4) for _ in range(3)] if step % 2 else [_group(rng, siblings=2, shortest=18)]


def _group(rng: np.random.Generator, *, siblings: int, shortest: int = 3) -> TakenGroup:
    rollouts = tuple(_rollout(rng, int(rng.integers(shortest, 20))) for _ in range(siblings))
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
    return TakenGroup(group=group, version_at_commit=0, version_at_take=0)


def _rollout(rng: np.random.Generator, length: int) -> Rollout:
    mask = np.zeros(length, np.uint8)
    mask[2:] = rng.random(length - 2) < 0.8
    mask[-1] = 1
    logprobs = np.where(mask, rng.normal(-np.log(VOCABULARY), 0.2, length), 0).astype(np.float32)
    row = Sample(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=(VersionSpan(version=0, start=2, stop=length),),
    )
    return Rollout(samples=(row,), reward=float(rng.random()), status=Status.OK)


def train(rank_group: RankGroup, first: int, last: int, capacity: int = 40) -> list[dict[str, float]]:
    results = [rank_group.step(batch(step, rank_group.num_shards, capacity)) for step in range(first, last + 1)]
    return [
        {"loss": each.loss, "grad_norm": each.grad_norm, "lr": each.learning_rate, **each.metrics, **each.experts}
        for each in results
    ]


def lead(folder: Path, under: Config) -> None:
    """Train, saving in the middle; then resume from there with a new rank group."""
    checkpoints = folder / "checkpoints"
    rank_group = RankGroup(under, OBJECTIVE, shape(under))
    rank_group.run(KeepAlive())
    rows = train(rank_group, 1, SAVED_AT)
    rank_group.save(checkpoints, step=SAVED_AT, extra={"version": 12}, keep=2).result()
    rows += train(rank_group, SAVED_AT + 1, STEPS)
    save_file(weights_of(rank_group), folder / "weights.safetensors")
    rank_group.stop()

    meet(folder / "again", under, 0)
    successor = RankGroup(under, OBJECTIVE, shape(under))
    extra = successor.load(checkpoints)
    resumed = train(successor, SAVED_AT + 1, STEPS)
    successor.stop()
    (folder / "result.json").write_text(json.dumps({"rows": rows, "resumed": resumed, "extra": extra}))


def meet(store: Path, under: Config, rank: int, ranks: int = 2) -> None:
    gc.collect()  # an earlier learner's groups, whose threads wake a hundred times a second each
    chosen = under.learner.parallel
    parallel.initialize(
        device=CPU,
        tensor=chosen.tensor,
        pipeline=chosen.pipeline,
        virtual_stages=chosen.virtual_stages,
        context=chosen.context,
        expert=chosen.expert,
        rendezvous=parallel.Rendezvous(store=FileStore(str(store), ranks), rank=rank, world_size=ranks),
    )


@dataclass(frozen=True)
class FileStores:
    """`GroupStores` of processes that share a folder."""

    folder: Path

    def open(self, name: str) -> Store:
        self.folder.mkdir(exist_ok=True)
        return FileStore(str(self.folder / name), -1)


def every_layout(root: Path, rank: int) -> None:
    for name, sizes in LAYOUTS.items():
        folder, under = root / name, config(**sizes)
        folder.mkdir(exist_ok=True)
        meet(folder / "first", under, rank)
        if rank == 0:
            lead(folder, under)
        else:
            follow(under, OBJECTIVE, shape(under))
            meet(folder / "again", under, rank)
            follow(under, OBJECTIVE, shape(under))


def full_disk(root: Path, rank: int) -> None:
    """Rank 1's disk takes a checkpoint from before the first step, and not one that also holds its shard of the moments."""
    under = config()
    meet(root / "meeting", under, rank)
    if rank == 0:
        rank_group = RankGroup(under, OBJECTIVE, shape(under))
        rank_group.save(root / "checkpoints", step=0, extra={}, keep=2).result()
        rank_group.step(batch(1, rank_group.num_shards))
        failed = rank_group.save(root / "checkpoints", step=1, extra={}, keep=2)
        rank_group.step(batch(2, rank_group.num_shards))
        rank_group.stop()
        failed.result()
    else:
        weights = 4 * sum(math.prod(row.shape) for row in table(shape(under)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (weights, weights))
        follow(under, OBJECTIVE, shape(under))


def deserted(root: Path, rank: int) -> None:
    """Rank 0 vanishes between two orders."""
    under = config()
    meet(root / "meeting", under, rank)
    if rank == 0:
        RankGroup(under, OBJECTIVE, shape(under)).run(KeepAlive())
        os._exit(99)
    follow(under, OBJECTIVE, shape(under))


if __name__ == "__main__":
    with boundary("rank"):
        {"every_layout": every_layout, "full_disk": full_disk, "deserted": deserted}[sys.argv[1]](
            Path(sys.argv[2]), int(sys.argv[3])
        )
