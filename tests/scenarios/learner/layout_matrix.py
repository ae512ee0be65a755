"""Many ways to divide one model among two or four ranks, and what one of four processes does with all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from async_rl.config import Config
from async_rl.errors import boundary
from async_rl.models.shape import ModelShape
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup, follow
from tests.support.full_weights import weights_of
from tests.support.learner_rank import config, meet, shape, train

PROCESSES, STEPS = 4, 2
DENSE: dict[str, Any] = {"layers": 4, "epochs": 2}
EXPERTS: dict[str, Any] = {**DENSE, "experts": 4}
BALANCED: dict[str, Any] = {**EXPERTS, "epochs": 1, "router": {"balancing_loss": 0.5, "z_loss": 0.05}}
LORA: dict[str, Any] = {**DENSE, "lora": {"rank": 4, "alpha": 32.0}}
LORA_EXPERTS: dict[str, Any] = {**EXPERTS, "lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
OLMO2: dict[str, Any] = {**DENSE}
"""The same size with norms after attention and MLP, and over all heads of query and key, of which a tensor rank has some."""
MODELS = {"dense": DENSE, "experts": EXPERTS, "balanced": BALANCED, "lora": LORA, "lora_experts": LORA_EXPERTS, "olmo2": OLMO2}
OBJECTIVE = Objective.model_validate(
    {
        "policy_loss": {
            "surrogate": "ppo_clip",
            "anchor": "proximal",
            "kl": {"coefficient": 0.1},
            "entropy_coefficient": 0.01,
        }
    }
)
"""Asks the policy before it trains, and a frozen one."""


def shape_of(model: dict[str, Any]) -> ModelShape:
    plain = shape(config(**model))
    if model is not OLMO2:
        return plain
    return replace(plain, family="olmo2", qk_norm=True, qk_norm_over="projection", norms="after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`parallel` and other settings of a learner, for a model."""

    ranks: int
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: DENSE)

    @property
    def config(self) -> Config:
        return config(**self.model, **self.settings)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model)


CASES = {
    "sequence": Case(ranks=2, settings={"tensor": 2, "sequence": True}),
    "interleaved": Case(ranks=2, settings={"pipeline": 2, "virtual_stages": 2}),
    "context": Case(ranks=2, settings={"context": 2}),
    "experts": Case(ranks=2, settings={"expert": 2}, model=EXPERTS),
    "experts_whole": Case(ranks=2, settings={"tensor": 2, "sequence": True}, model=EXPERTS),
    "olmo2": Case(ranks=2, settings={"tensor": 2, "sequence": True}, model=OLMO2),
    "recompute_sequence": Case(ranks=2, settings={"tensor": 2, "sequence": True, "recompute": "full"}),
    "recompute_interleaved": Case(ranks=2, settings={"pipeline": 2, "virtual_stages": 2, "recompute": "selective"}),
    "tensor_pipeline": Case(ranks=4, settings={"tensor": 2, "pipeline": 2}),
    "sequence_interleaved": Case(ranks=4, settings={"tensor": 2, "sequence": True, "pipeline": 2, "virtual_stages": 2}),
    "tensor_data": Case(ranks=4, settings={"tensor": 2}),
    "interleaved_data": Case(ranks=4, settings={"pipeline": 2, "virtual_stages": 2}),
    "context_sequence": Case(ranks=4, settings={"context": 2, "tensor": 2, "sequence": True}),
    "context_data": Case(ranks=4, settings={"context": 2}),
    "context_pipeline": Case(ranks=4, settings={"context": 2, "pipeline": 2, "recompute": "full"}),
    "four_stages": Case(ranks=4, settings={"pipeline": 4}),
    "experts_sequence_data": Case(ranks=4, settings={"expert": 4, "tensor": 2, "sequence": True}, model=EXPERTS),
    "experts_pipeline": Case(ranks=4, settings={"expert": 2, "pipeline": 2}, model=EXPERTS),
    "experts_context": Case(ranks=4, settings={"expert": 4, "context": 4}, model=EXPERTS),
    "experts_data": Case(ranks=4, settings={"expert": 2}, model=EXPERTS),
    "balanced_sequence_data": Case(ranks=4, settings={"expert": 4, "tensor": 2, "sequence": True}, model=BALANCED),
    "balanced_context_pipeline": Case(
        ranks=4, settings={"expert": 2, "context": 2, "pipeline": 2, "recompute": "full"}, model=BALANCED
    ),
    "lora_sequence": Case(ranks=2, settings={"tensor": 2, "sequence": True, "recompute": "full"}, model=LORA),
    "lora_interleaved": Case(ranks=2, settings={"pipeline": 2, "virtual_stages": 2}, model=LORA),
    "lora_tensor_data": Case(ranks=4, settings={"tensor": 2}, model=LORA),
    "lora_context_pipeline": Case(ranks=4, settings={"context": 2, "pipeline": 2}, model=LORA),
    "lora_experts": Case(ranks=4, settings={"expert": 4, "tensor": 2, "sequence": True}, model=LORA_EXPERTS),
}


FEW = {
    name: CASES[name]
    for name in (
        *("recompute_sequence", "recompute_interleaved", "experts", "lora_interleaved", "olmo2"),
        *("context_sequence", "balanced_sequence_data", "balanced_context_pipeline", "lora_tensor_data"),
    )
}
"""Each way to divide, most of them combined with another."""


def capacity_of(model: dict[str, Any]) -> int:
    """With a balancing loss a row for each sequence, because that loss depends on what shares a row."""
    return 1 if model is BALANCED else 40


def every_case(cases: Mapping[str, Case], root: Path, process: int) -> None:
    """Cases of two ranks go to the first and the second half of the processes, in turn."""
    halves = 0
    for name, case in cases.items():
        mine = True
        if case.ranks < PROCESSES:
            mine, halves = process // case.ranks == halves % 2, halves + 1
        if mine:
            play(root / name, case, process % case.ranks)


def play(folder: Path, case: Case, rank: int) -> None:
    folder.mkdir(exist_ok=True)
    under = case.config
    meet(folder / "meeting", under, rank, case.ranks)
    if rank > 0:
        follow(under, OBJECTIVE, case.shape)
        return
    rank_group = RankGroup(under, OBJECTIVE, case.shape)
    (folder / "rows.json").write_text(json.dumps(train(rank_group, 1, STEPS, capacity_of(case.model))))
    save_file(weights_of(rank_group), folder / "weights.safetensors")
    rank_group.stop()


if __name__ == "__main__":
    with boundary("rank"):
        every_case({"few": FEW, "all": CASES}[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
