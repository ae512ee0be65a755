"""The small copy of a run that `async-rl rehearse` plays on a CPU: same sections, everything divided down to this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from async_rl.config import Config
from async_rl.config.hub.datasets import DatasetConfig
from async_rl.config.hub.snapshot import NotReachable
from async_rl.config.learner import ParallelConfig
from async_rl.config.rollout import EnvironmentConfig

TOKENS = 24
"""Tokens of an answer."""
ROWS = {"question": "configs/train/word_problems.jsonl", "prompt": "configs/train/competition_problems.jsonl"}
"""Rows that stand in for a dataset that cannot be reached, by the column of its prompts."""

_MODELS = ("critic", "reference", "teacher")


def rehearsed(config: Config, model: Path, folder: Path, *, steps: int, processes: int) -> tuple[Config, list[str]]:
    """Return the small run, in `folder` with the small `model`, on up to `processes` ranks, and what stands in for what."""
    tree = config.model_dump(mode="json")
    said: list[str] = []
    small = {"folder": str(model), "name": "", "revision": ""}
    if config.model.size is None:
        tree["model"] |= small
        tree["tokenizer"] = {"type": "huggingface", **small}
    for name in _MODELS:
        if (section := tree["learner"][name]) and (section.get("folder") or section.get("name")):
            tree["learner"][name] = section | small
    for section in tree["policies"].values():
        if section["type"] == "hf":
            section |= small
    parallel = divided(config.learner.parallel, processes)
    tree["model"] |= {"layer_spec": "local", "max_sequence": _at_most(config.model.max_sequence, 4096)}
    tree["environments"] = [_reachable(each, said).model_dump(mode="json") for each in config.environments]
    tree["sampling"]["max_tokens"] = min(TOKENS, config.sampling.max_tokens)
    tree["run"] |= {"folder": str(folder.parent), "name": folder.name}
    tree["redis"] = {"payloads": config.redis.payloads if config.redis.payloads in ("redis", "files") else "files"}
    tree["batch"] |= {
        "groups_per_step": 2,
        "group_size": min(2, config.batch.group_size),
        "minibatches": min(2, config.batch.minibatches),
        "tokens_per_step": None,
        "bin_tokens": min(512, config.batch.bin_tokens),
        "drop_no_signal": False,  # a model with random weights earns nothing
    }
    tree["replay"] |= {"min_groups": min(2, config.replay.min_groups), "error_buffer": None}
    tree["learner"] |= {"steps": steps, "checkpoint_every": steps, "precision": "auto", "parallel": parallel.model_dump()}
    tree["learner"]["optimizer"] |= {"offload": False, "warmup_steps": 0}
    tree["worker"] |= {"processes": 1, "engines": 1, "tensor": 1, "groups_in_flight": 2, "kv_cache_gb": 0.25}
    tree["evaluation"] |= {"every": steps, "tasks": 2, "samples": 1, "k": [1], "greedy": False}
    tree["wire"] |= {"host": "127.0.0.1", "insecure": False, "push_every_steps": 1, "push_every_s": 0.0, "snapshots": ""}
    tree["metrics"] = {"console": True}
    tree["device"] = "cpu"
    return Config.model_validate(tree), said


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


def _at_most(value: int | None, most: int) -> int:
    return most if value is None else min(value, most)


def _reachable(section: EnvironmentConfig, said: list[str]) -> EnvironmentConfig:
    """Return the environment with rows of the same form where its dataset is not reachable."""
    args = section.args
    if section.type != "dataset" or not isinstance(args.get("path"), str):
        return section
    dataset = DatasetConfig.model_validate({key: args[key] for key in ("path", "revision") if key in args})
    prompt = str(args.get("prompt", "prompt"))
    try:
        if not dataset.is_on_hub or dataset.commit():
            return section
    except NotReachable:
        if prompt not in ROWS:
            raise
    said.append(f"{section.label}: rows of {ROWS[prompt]} stand in for {dataset.path}, which is not in the Hub's cache")
    return section.model_copy(update={"args": _with_rows(args, ROWS[prompt])})


def _with_rows(args: Mapping[str, JsonValue], path: str) -> dict[str, JsonValue]:
    return {key: value for key, value in args.items() if key not in ("subset", "split", "revision", "filters")} | {"path": path}
