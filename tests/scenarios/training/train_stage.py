"""Trainings small enough for a test, and what one of two ranks does in them under each layout."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from async_rl.config.training import METHODS, Method, TrainingConfig
from async_rl.megatron import parallel
from async_rl.models.from_config import model_shape
from async_rl.tokenization.tokenizers import open_tokenizer
from learner.checkpoints.checkpointer import Checkpointer
from learner.ranks.distributed import init_distributed
from learner.training.checkpoints import TableProgress, TrainingCheckpoints
from learner.training.examples import ExampleReader
from learner.training.models import build_models
from learner.training.table import Table, TokenLimits
from learner.training.trainer import TableStep, TableTrainer
from tests.support.full_weights import weights_of_model

ALPHABET = "0123456789="
TABLES = {False: "counting", True: "counting_pairs"}
"""Shipped tables, by whether rows are pairs."""


def config(method: Method, **sections: Mapping[str, Any]) -> TrainingConfig:
    compares = METHODS[method].compares
    table = f"configs/train/{TABLES[compares]}"
    content: dict[str, Any] = {
        "run": {"name": method},
        "model": {"size": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}},
        "tokenizer": {"type": "characters", "alphabet": ALPHABET},
        "data": {"path": f"{table}.jsonl", "held_out": {"path": f"{table}_held_out.jsonl", "every": 2, "examples": 10}},
        "batch": {"examples_per_step": 9, "bin_tokens": 40},
        # well above rounding: Adam would blow up what layouts make of gradients that are almost 0
        "learner": {"steps": 2, "optimizer": {"learning_rate": 0.01, "eps": 1e-4, "clip_grad": 0.5, "weight_decay": 0.1}},
        "device": "cpu",
    }
    for section, changes in sections.items():
        content[section] = {**content.get(section, {}), **changes}
    return METHODS[method].model_validate(content)


@dataclass
class Notes:
    """A report that remembers."""

    rows: list[dict[str, float]] = field(default_factory=list)
    examined: list[dict[str, float]] = field(default_factory=list)

    def trained(self, trained: TableStep) -> None:
        result = trained.result
        self.rows.append({"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics})

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        self.examined.append({"step": step, **metrics})


def run(config: TrainingConfig, folder: Path) -> tuple[Notes, dict[str, Tensor] | None]:
    """All its steps, and the weights on rank 0. What `learner.training.__main__` does, but for signals and sinks."""
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    read = ExampleReader.of(config.data, tokenizer, compares=config.compares)
    room = TokenLimits(row=config.batch.bin_tokens, context=shape.max_positions)
    table, notes = Table.to_train(config.data, read, room, seed=config.run.seed), Notes()
    device = init_distributed(config)
    steps = config.steps(len(table))
    model, method = build_models(config, shape, device, total_updates=steps)
    checkpointer = Checkpointer({"policy": model}, device)
    TableTrainer(
        config,
        steps=steps,
        model=model,
        method=method,
        table=table,
        held_out=Table.held_out(config.data, read, room),
        checkpoints=TrainingCheckpoints(checkpointer, folder, keep=2),
        report=notes,
        stop=threading.Event(),
    ).run(TableProgress(step=0, place=0))
    weights = weights_of_model(model)
    checkpointer.close()
    parallel.shutdown()
    return notes, weights


CASES: dict[str, tuple[Method, ...]] = {
    "alone": ("sft", "dpo", "rm", "distill"),
    "tensor": ("sft", "dpo", "distill"),
    "data": ("sft", "dpo", "rm"),
    "pipeline": ("dpo",),
}
"""By layout."""


def trainings(layout: str, teacher: Path) -> list[TrainingConfig]:
    parallel = {"tensor": 2 if layout == "tensor" else 1, "pipeline": 2 if layout == "pipeline" else 1}
    learner = {**config("sft").learner.model_dump(include={"steps", "optimizer"}), "parallel": parallel}
    distill = {"distill": {"teacher": str(teacher), "direction": "mixed"}}
    return [config(method, learner=learner, **(distill if method == "distill" else {})) for method in CASES[layout]]


def every_layout(root: Path, rank: int) -> None:
    for layout in ("tensor", "data", "pipeline"):
        for each in trainings(layout, root / "teacher"):
            folder = root / layout / each.method
            folder.mkdir(parents=True, exist_ok=True)
            meeting = parallel.Rendezvous(store=dist.FileStore(str(folder / "meeting"), 2), rank=rank, world_size=2)
            sizes = each.learner.parallel
            parallel.initialize(
                device=parallel.resolve_device("cpu"), tensor=sizes.tensor, pipeline=sizes.pipeline, rendezvous=meeting
            )
            notes, weights = run(each, folder)
            gc.collect()  # the groups, whose threads wake a hundred times a second each
            if weights:  # empty on ranks above 0
                save_file(weights, folder / "weights.safetensors")
                (folder / "notes.json").write_text(json.dumps({"rows": notes.rows, "examined": notes.examined}))


if __name__ == "__main__":
    {"every_layout": every_layout}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
