"""The small copy of a run that `async-rl rehearse` plays on a CPU: same sections, everything divided down to this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from async_rl.config import Config
from async_rl.config.hub.datasets import DatasetConfig
from async_rl.config.hub.snapshot import NotReachable
from async_rl.config.learner import ParallelConfig
from async_rl.config.pretrained import DATASET_ENVIRONMENTS, reads_dataset
from async_rl.config.training import ExampleDataset, TrainingConfig
from async_rl.datasets.columns import MissingColumn, column
from async_rl.datasets.opening import open_rows

TOKENS = 24
"""Tokens of an answer."""
LONGEST = 4096
"""Tokens of an episode."""
EXAMPLES = 4
"""Examples of a step of `async-rl train`."""
SHIPPED_EXAMPLES = {False: "configs/train/counting", True: "configs/train/counting_pairs"}
"""Examples that stand in for a dataset that cannot be reached, by whether they are pairs."""
SHIPPED_ROWS = ("configs/train/word_problems.jsonl", "configs/train/competition_problems.jsonl")
"""Rows that stand in for a dataset that cannot be reached and has the same columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A model with random weights in place of every pretrained one."""

    folder: Path
    tokenizer: Path
    positions: int


def rehearsed(
    config: Config, small: SmallModel | None, folder: Path, *, steps: int, processes: int
) -> tuple[Config, list[str]]:
    """Return the small run, in `folder` and on up to `processes` ranks, and which rows stand in for others."""
    tree = config.model_dump(mode="json")
    said: list[str] = []
    if small is not None:
        _replace_models(tree, small)
    environments = [_with_rows(each, said) | {"max_share": 1.0} for each in tree["environments"]]
    only_rows = all(
        each["type"] in (*DATASET_ENVIRONMENTS, "multi_task") for each in environments
    )  # games need whole tables of siblings
    tree["environments"] = environments
    tree["sampling"]["max_tokens"] = min(TOKENS, config.sampling.max_tokens)
    tree["run"] |= {"folder": str(folder.parent), "name": folder.name}
    tree["redis"] = {"payloads": "redis" if config.redis.payloads == "redis" else "files"}
    tree["batch"] |= {
        "groups_per_step": 2,
        "group_size": min(2, config.batch.group_size) if only_rows else config.batch.group_size,
        "minibatches": min(2, config.batch.minibatches),
        "tokens_per_step": None,
        "bin_tokens": min(512, config.batch.bin_tokens),
        "drop_no_signal": False,  # a model with random weights earns nothing
    }
    tree["replay"] |= {"min_groups": min(2, config.replay.min_groups), "error_buffer": None}
    if (critic := tree["learner"]["critic"]) is not None and critic["type"] == "own":
        critic |= {"optimizer": critic["optimizer"] | ON_CPU, "warmup_steps": 0}
    tree["learner"] |= _small_learner(tree, config.learner.parallel, steps, processes)
    tree["worker"] |= {"processes": 1, "engines": 1, "tensor": 1, "expert": 1, "groups_in_flight": 2, "kv_cache_gb": 0.25}
    tree["evaluation"] |= {"every": steps, "tasks": 2, "samples": 1, "k": [1], "greedy": False, "wait_s": 120.0}
    tree["wire"] |= {"host": "127.0.0.1", "insecure": False, "push_every_steps": 1, "push_every_s": 0.0, "snapshots": ""}
    tree["metrics"] = {"console": True}
    tree["device"] = "cpu"
    return Config.model_validate(tree), said


ON_CPU = {"offload": False, "warmup_steps": 0}


def rehearsed_training(
    config: TrainingConfig, small: SmallModel | None, folder: Path, *, steps: int, processes: int
) -> tuple[TrainingConfig, list[str]]:
    """The same for a run of `async-rl train`."""
    tree = config.model_dump(mode="json")
    said: list[str] = []
    if small is not None:
        _replace_policy(tree, small)
        for section in (tree.get("dpo", {}).get("reference"), tree.get("distill", {}).get("teacher")):
            if section is not None:
                section |= _place(small)
    data, rows = tree["data"], SHIPPED_EXAMPLES[config.compares]
    for table, weighted in zip(data["datasets"], config.data.datasets, strict=True):
        table["name"] = weighted.label  # which several of the same rows would share
        _stand_in(table, weighted, f"{rows}.jsonl", said)
    _stand_in(data, config.data, f"{rows}.jsonl", said)
    data["too_long"] = "drop"
    if config.data.held_out is not None:
        data["held_out"] |= {"every": steps, "examples": EXAMPLES}
        _stand_in(data["held_out"], config.data.held_out, f"{rows}_held_out.jsonl", said)
    tree["run"] |= {"folder": str(folder.parent), "name": folder.name}
    tree["batch"] = {"examples_per_step": EXAMPLES, "bin_tokens": min(LONGEST, config.batch.bin_tokens)}
    tree["learner"] |= _small_learner(tree, config.learner.parallel, steps, processes) | {"epochs": None}
    tree["metrics"] = {"console": True}
    tree["device"] = "cpu"
    return type(config).model_validate(tree), said


def _stand_in(table: dict[str, Any], dataset: DatasetConfig, rows: str, said: list[str]) -> None:
    """Replace a dataset that cannot be reached by shipped rows, which have the columns that a table of examples has."""
    try:
        if dataset.is_on_hub:
            open_rows(dataset)
    except NotReachable:
        said.append(f"rows of {rows} stand in for {dataset.path}, which is not in the Hub's cache")
        table |= ExampleDataset(path=rows).model_dump(mode="json")


def _small_learner(tree: dict[str, Any], parallel: ParallelConfig, steps: int, processes: int) -> dict[str, Any]:
    return {
        "optimizer": tree["learner"]["optimizer"] | ON_CPU,
        "steps": steps,
        "checkpoint_every": steps,
        "precision": "auto",
        "parallel": divided(parallel, processes).model_dump(),
    }


def divided(parallel: ParallelConfig, processes: int) -> ParallelConfig:
    """Keep as many dimensions of parallelism, with two ranks each, as that many processes allow."""
    sizes, left = dict[str, Any](), processes
    for name in ("tensor", "expert", "pipeline", "context"):
        if getattr(parallel, name) > 1 and left >= 2:
            sizes[name], left = 2, left // 2
    if "tensor" in sizes:
        sizes["sequence"] = parallel.sequence
    if parallel.processes > 1 and not sizes and left >= 2:
        sizes["processes"] = 2
    return ParallelConfig.model_validate(sizes)


def _place(small: SmallModel) -> dict[str, str]:
    return {"folder": str(small.folder), "name": "", "revision": ""}


def _replace_policy(tree: dict[str, Any], small: SmallModel) -> None:
    longest = min(LONGEST, small.positions)
    given = tree["model"]["max_sequence"]
    tree["model"] |= _place(small) | {"layer_spec": "local", "max_sequence": longest if given is None else min(given, longest)}
    if tree["tokenizer"]["type"] == "huggingface":
        tree["tokenizer"] |= {"folder": str(small.tokenizer), "name": "", "revision": ""}


def _replace_models(tree: dict[str, Any], small: SmallModel) -> None:
    _replace_policy(tree, small)
    learner = tree["learner"]
    for section in (learner["critic"], learner["reference"], learner["teacher"], *tree["policies"].values()):
        if section is not None and (section.get("folder") or section.get("name")):
            section |= _place(small)


def _with_rows(section: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """Return an environment with rows of the same columns where its dataset is not reachable."""
    args: dict[str, Any] = section["args"]
    if section["type"] == "multi_task" and isinstance(args.get("environments"), list):
        members = [_with_rows({"args": {}, **member}, said) for member in args["environments"]]
        return {**section, "args": {**args, "environments": members}}
    if not isinstance(args.get("path"), str) or not (
        DatasetConfig(path=args["path"]).is_on_hub and reads_dataset(section["type"])
    ):
        return section
    dataset = DatasetConfig.model_validate({key: value for key, value in args.items() if key in DatasetConfig.model_fields})
    try:
        open_rows(dataset)
        return section
    except NotReachable as error:
        given = {key: value for key, value in args.items() if key not in ("subset", "split", "revision", "filters")}
        for path in SHIPPED_ROWS:
            if "template" not in args and _has_columns(path, args):
                said.append(f"rows of {path} stand in for {dataset.path}, which is not in the Hub's cache")
                return {**section, "args": given | {"path": path}}
        raise NotReachable(f"{error}; no bundled rows have its columns, so that it cannot be rehearsed without") from error


def _has_columns(path: str, args: Mapping[str, JsonValue]) -> bool:
    first = open_rows(DatasetConfig(path=path))[0]
    further = args.get("columns", [])
    try:
        for wanted in (
            args.get("prompt", "prompt"),
            args.get("answer", "answer"),
            *(further if isinstance(further, list) else []),
        ):
            if wanted:
                column(first, str(wanted))
    except MissingColumn:
        return False
    return True
