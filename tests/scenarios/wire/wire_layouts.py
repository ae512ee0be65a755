"""Learners of one run, divided in many ways one after another, and what one of four processes does for each of them.

Workers follow them all: they answer each version with rollouts, on which that learner then trains.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from async_rl.config import Config, WireConfig
from async_rl.errors import boundary
from async_rl.protocols import Board
from async_rl.transport.sending.sender import WeightSender
from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionRecord, VersionSpan
from buffer import open_group_stores
from learner.batches.batch import PackedBatch, pack_batch
from learner.objective import Objective
from learner.ranks.orders import OpenSender, PackVersion
from learner.ranks.rank_group import RankGroup, follow
from tests.support.full_weights import weights_of
from tests.support.learner_rank import OBJECTIVE, config, meet, shape, train
from tests.support.ppo_stage import EVERYTHING, SHARED
from tests.support.wire_board import board_of, config_of
from tests.support.wire_weights import all_behind

PROCESSES = 4
PUSHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One run: a model, and the workers that serve it."""

    size: dict[str, Any]
    """What is not as in learner_rank."""
    workers: tuple[int, ...]
    """How many tensor ranks each has."""
    wire: str = "model"


DENSE = {"layers": 4, "init_std": 0.1}
EXPERTS = {**DENSE, "experts": {"number": 4, "per_token": 2, "ffn": 16, "every": 2}}
MODELS = {
    "tied": Model(size=DENSE, workers=(1, 2)),
    "experts": Model(size=EXPERTS, workers=(1,)),
    "half": Model(size=DENSE, workers=(1,), wire="bfloat16"),
    "untied": Model(size={**DENSE, "tied_embeddings": False}, workers=(1, 2)),
    "tied_experts": Model(size=EXPERTS, workers=(1, 2)),
    "untied_experts": Model(size={**EXPERTS, "tied_embeddings": False}, workers=(1, 2)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    ranks: int
    shared: bool
    """Memory, or process groups."""
    parallel: dict[str, Any]
    critic: bool = False
    """That shares the policy's layers."""
    resumes: str = ""
    """The case that it takes up from a checkpoint."""

    @property
    def config(self) -> Config:
        tree = config(**self.parallel).model_dump()
        tree["model"]["size"] |= MODELS[self.model].size
        tree["wire"] |= {"shared_memory": self.shared, "dtype": MODELS[self.model].wire, "bucket_mb": 0.01}
        if self.critic:
            tree["learner"]["critic"] = SHARED
            tree["batch"]["drop_no_signal"] = False
        return Config.model_validate(tree)

    @property
    def objective(self) -> Objective:
        return EVERYTHING if self.critic else OBJECTIVE


FEW = {
    "tensor": Case(model="tied", ranks=2, shared=True, parallel={"tensor": 2}),
    "alone": Case(model="tied", ranks=1, shared=True, parallel={}, resumes="tensor"),
    "interleaved": Case(model="tied", ranks=2, shared=False, parallel={"pipeline": 2, "virtual_stages": 2}, critic=True),
    "half": Case(model="half", ranks=2, shared=False, parallel={"pipeline": 2}),
    "experts_pipeline": Case(model="experts", ranks=4, shared=True, parallel={"expert": 2, "pipeline": 2}),
    "experts_data": Case(model="experts", ranks=4, shared=False, parallel={"expert": 2}, resumes="experts_pipeline"),
}
"""The others are among `ALL`."""
_DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "data": (2, {}),
    "interleaved": (2, {"pipeline": 2, "virtual_stages": 2}),
    "context": (2, {"context": 2}),
    "four_stages": (4, {"pipeline": 4}),
    "tensor_data": (4, {"tensor": 2, "sequence": True}),
    "tensor_pipeline": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    "tensor_context": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "pipeline_data": (4, {"pipeline": 2}),
}
_EXPERT_DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert": (2, {"expert": 2}),
    "expert_tensor_data": (4, {"expert": 4, "tensor": 2, "sequence": True}),
    "expert_data": (4, {"expert": 2}),
    "expert_pipeline": (4, {"expert": 2, "pipeline": 2}),
    "expert_context": (4, {"expert": 4, "context": 4}),
}
ALL = {
    f"{model}_{name}_{'memory' if shared else 'gloo'}": Case(model=model, ranks=ranks, shared=shared, parallel=parallel)
    for model in ("tied", "untied", "tied_experts", "untied_experts")
    for name, (ranks, parallel) in (_DIVISIONS | (_EXPERT_DIVISIONS if "experts" in model else {})).items()
    for shared in (True, False)
}
CASES = {"few": FEW, "all": ALL}


def members_of(model: str) -> list[str]:
    return [f"{model}-{tensor}" for tensor in MODELS[model].workers]


def weights_file(root: Path, model: str, version: int) -> Path:
    """What the learner says it has pushed."""
    return root / f"{model}-{version}.safetensors"


def saved_file(root: Path, name: str) -> Path:
    """What a case's checkpoint holds, where another takes it up."""
    return root / f"{name}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of the processes."""

    root: Path
    process: int
    cases: dict[str, Case]
    url: str

    def play(self) -> None:
        """Cases of fewer ranks go to the first or the second half of the processes: each run has its own half."""
        for number, (name, case) in enumerate(self.cases.items()):
            half = self.process // 2 == [*MODELS].index(case.model) % 2
            rank = self.process % (PROCESSES if case.ranks == PROCESSES else 2)
            if rank < case.ranks and (half or case.ranks == PROCESSES):
                self._take_part(name, case, rank, number)

    def _take_part(self, name: str, case: Case, rank: int, number: int) -> None:
        under, of = case.config, shape(case.config)
        meet(self.root / f"{name}-meeting", under, rank, case.ranks)
        if rank > 0:
            with open_group_stores(config_of(self.url, case.model)) as stores:
                follow(under, case.objective, of, stores)
            return
        with open_group_stores(config_of(self.url, case.model)) as stores:
            self._lead(name, case, RankGroup(under, case.objective, of, stores), number)

    def _lead(self, name: str, case: Case, rank_group: RankGroup, number: int) -> None:
        if case.resumes:
            rank_group.load(self.root / case.resumes)
        else:
            train(rank_group, 1, 1)
        notes = asyncio.run(self._push(rank_group, case, number))
        if any(other.resumes == name for other in self.cases.values()):
            rank_group.save(self.root / name, step=1, extra={}, keep=1).result()
            save_file(weights_of(rank_group), saved_file(self.root, name))
        rank_group.stop()
        (self.root / f"{name}.json").write_text(json.dumps(notes))

    async def _push(self, rank_group: RankGroup, case: Case, number: int) -> list[dict[str, Any]]:
        """Versions rise from case to case, and so do fences: each learner follows the last one."""
        notes: list[dict[str, Any]] = []
        members, rank_sender, fence = members_of(case.model), rank_group.run(OpenSender(fence=number + 1)), number + 1
        async with board_of(self.url, case.model) as board, AsyncExitStack() as opened:
            await board.take_over(fence)
            sender = await opened.enter_async_context(WeightSender(board, case.config.wire, rank_sender, fence=fence))
            for version in range(PUSHES * number, PUSHES * (number + 1)):
                save_file(weights_of(rank_group), weights_file(self.root, case.model, version))
                digest = rank_group.run(PackVersion(version=version, keep=())).result()
                record = VersionRecord(version=version, timeline="a", step=version, digest=digest)
                await all_behind(sender, version, members)
                report = await sender.push(record)
                await sender.flip(record)
                rollouts = await _rollouts(board, version, members)
                result = rank_group.step(_batch(rollouts, version, case.objective, rank_group.num_shards))
                notes.append(
                    {
                        "version": version,
                        "staged": sorted(report.staged),
                        "tokens": result.metrics["policy/tokens"],
                        "gap": result.metrics["policy/logprob_abs_diff_max"],
                        "senders": [parcel.sender for parcel in rank_sender.layout.parcels],
                        "in_memory": [packed.address != "" for packed in rank_sender.packed[version]],
                    }
                )
        return notes


async def _rollouts(board: Board, version: int, members: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    position = "0"
    while found.keys() < set(members):
        for place, message in await board.read("rollouts", position, 5.0):
            position = place
            if message["version"] == version:
                found[message["member"]] = message["rollouts"]
    return [rollout for of_member in found.values() for rollout in of_member]


def _batch(rollouts: Sequence[dict[str, Any]], version: int, objective: Objective, num_shards: int) -> PackedBatch:
    task = Task(key="t", environment="e", prompt="p")
    made = tuple(_rollout(number, version, **each) for number, each in enumerate(rollouts))
    group = RolloutGroup(id="g", task=task, rollouts=made, worker="w")
    taken = TakenGroup(group=group, version_at_commit=version, version_at_take=version)
    return pack_batch([taken], objective=objective, capacity=40, num_shards=num_shards)


def _rollout(number: int, version: int, *, prompt: list[int], token_ids: list[int], logprobs: list[float]) -> Rollout:
    start, stop = len(prompt), len(prompt) + len(token_ids)
    row = Sample(
        token_ids=np.array([*prompt, *token_ids], np.int32),
        loss_mask=np.array([0] * start + [1] * len(token_ids), np.uint8),
        logprobs=np.array([0.0] * start + logprobs, np.float32),
        versions=(VersionSpan(version=version, start=start, stop=stop),),
    )
    return Rollout(samples=(row,), reward=float(number % 3), status=Status.OK)


def wire_of_worker(model: str) -> WireConfig:
    return WireConfig(dtype="bfloat16" if MODELS[model].wire == "bfloat16" else "model")


if __name__ == "__main__":
    with boundary("rank"):
        torch.set_num_threads(1)
        which, root, process = sys.argv[1:]
        url = (Path(root) / "redis").read_text()
        Stage(root=Path(root), process=int(process), cases=CASES[which], url=url).play()
