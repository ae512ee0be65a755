"""A learner with a critic, small enough for a test, and what each of two ranks does under every layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from async_rl.config import Config
from async_rl.errors import boundary
from learner.batches.batch import PackedBatch, pack_batch
from learner.objective import Objective
from learner.ranks.rank_group import RankGroup, follow
from tests.support.full_weights import weights_of
from tests.support.learner_rank import config, meet, shape, taken_groups

EVERYTHING = Objective.model_validate(
    {
        "advantages": {"type": "gae", "gamma": 0.97, "lam": 0.9},
        "policy_loss": {
            "surrogate": {"type": "ppo_clip", "clip_high": 0.2},
            "anchor": "proximal",
            "correction": {"type": "truncate", "high": 1.2},
            "kl": {"estimator": "k2", "coefficient": 0.3},
            "entropy_coefficient": 0.05,
        },
        "value_loss": {"clip": 0.05},
        "kl_in_reward": 0.1,
    }
)
"""Asks every model that there is, except for a teacher."""
OPTIMIZER = {"learning_rate": 0.01, "eps": 1e-4, "clip_grad": 0.0}
OWN: dict[str, Any] = {"type": "own", "optimizer": OPTIMIZER}
SHARED: dict[str, Any] = {"type": "shared", "coefficient": 0.7}
CRITICS = {"own": OWN, "shared": SHARED}
SIZES: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "data": {}, "context": {"context": 2}}
LAYOUTS = {
    f"{layout}_{kind}": (SIZES[layout], CRITICS[kind])
    for layout, kind in (
        ("tensor", "own"), ("tensor", "shared"), ("pipeline", "own"), ("pipeline", "shared"),
        ("data", "own"), ("context", "shared"),
    )
}  # fmt: skip
FEW = ("tensor_own", "pipeline_shared", "data_own", "context_shared")
SETS = {"few": FEW, "all": tuple(LAYOUTS)}
STEPS, SAVED_AT = 3, 2


def learner_config(
    *, updates: tuple[int, int] = (1, 1), sizes: dict[str, int] | None = None, group_size: int = 4, **learner: Any
) -> Config:
    """`updates`: minibatches and epochs."""
    tree = config().model_dump()
    tree["learner"] |= {"optimizer": OPTIMIZER, "parallel": sizes if sizes is not None else {}, **learner}
    minibatches, epochs = updates
    tree["batch"] |= {"minibatches": minibatches, "epochs": epochs, "group_size": group_size, "drop_no_signal": False}
    return Config.model_validate(tree)


def batch(step: int, *, objective: Objective = EVERYTHING, num_shards: int = 1, minibatches: int = 1) -> PackedBatch:
    return pack_batch(taken_groups(step), objective=objective, capacity=40, num_shards=num_shards, minibatches=minibatches)


def train(rank_group: RankGroup, first: int, last: int) -> list[dict[str, float]]:
    """Several updates in each step, of which some have less to do than there are ranks."""
    results = [rank_group.step(batch(step, num_shards=rank_group.num_shards, minibatches=2)) for step in range(first, last + 1)]
    return [{"loss": each.loss, "grad_norm": each.grad_norm, **each.metrics} for each in results]


def divided(sizes: dict[str, int], critic: dict[str, Any]) -> Config:
    return learner_config(updates=(2, 2), sizes=sizes, critic=critic)


def play(layouts: Sequence[str], root: Path, rank: int) -> None:
    for name in layouts:
        sizes, critic = LAYOUTS[name]
        folder, under = root / name, divided(sizes, critic)
        folder.mkdir(exist_ok=True)
        meet(folder / "meeting", under, rank)
        if rank > 0:
            follow(under, EVERYTHING, shape(under))
            continue
        rank_group = RankGroup(under, EVERYTHING, shape(under))
        rows = train(rank_group, 1, SAVED_AT)
        rank_group.save(folder / "checkpoints", step=SAVED_AT, extra={}, keep=1).result()
        rows += train(rank_group, SAVED_AT + 1, STEPS)
        (folder / "rows.json").write_text(json.dumps(rows))
        save_file(weights_of(rank_group), folder / "weights.safetensors")
        rank_group.stop()


if __name__ == "__main__":
    with boundary("rank"):
        play(SETS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
