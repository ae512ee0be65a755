"""`async-rl train METHOD`, and loading the configuration of any kind of run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from async_rl.cli.grammar import CommandLine, Verb
from async_rl.cli.run import made_up_name, run_and_summarise
from async_rl.config.loading import LoadedConfig, check_named, load_named, load_with_origins, read_key, resolve
from async_rl.config.located_yaml import Plain
from async_rl.config.pretrained import fetched
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.config import Config
    from async_rl.config.training import AnyRun, Method, TrainingConfig

HELP: Mapping[Method, str] = {
    "sft": "Fine-tune on prompts and answers, conversations, or plain text.",
    "dpo": "Train on pairs of a preferred and a rejected answer (DPO).",
    "rm": "Train a reward model on such pairs.",
    "distill": "Distil a teacher model into a smaller one.",
}


def load_training(method: Method, args: Sequence[str]) -> TrainingConfig:
    """Load the configuration; a run without a name is named after its last file and the time. Raises ConfigError."""
    config = _resolved(method, args)
    return config if config.run.name else _resolved(method, [*args, "--run.name", made_up_name(args, method)])


def _resolved(method: Method, args: Sequence[str]) -> TrainingConfig:
    from async_rl.config.training import METHODS

    return fetched(resolve(METHODS[method], args, example=f"configs/train/{method}.yaml").config)


def resolve_any(args: Sequence[str]) -> LoadedConfig[Config] | LoadedConfig[TrainingConfig]:
    """Load the configuration of either kind of run, and fetch nothing: only those of `async-rl train` have a `method`."""
    from async_rl.config.training import METHODS

    if (found := read_key("method", args)) is None:
        return load_with_origins(args)
    method = _method(found)
    return resolve(METHODS[method], args, example=f"configs/train/{method}.yaml")


def load_described(args: Sequence[str]) -> TrainingConfig:
    """Load the configuration of a named training run, whose `method` key says which kind it is."""
    found = read_key("method", args)
    if found is None and not any(word.startswith("@") for word in args):
        raise ConfigError("no file was given; name that of a run of `async-rl train`, for example: @ runs/NAME/config.yaml")
    config = _resolved(_method(found), args)
    check_named(config.run.name)
    return config


def _method(found: Plain) -> Method:
    from async_rl.config.training import METHODS

    for method in METHODS:
        if method == found:
            return method
    said = "is not set" if found is None else f"{found!r} does not exist"
    raise ConfigError(f"method: {said}; a run of `async-rl train` has one of {', '.join(METHODS)}")


def load_any(args: Sequence[str]) -> AnyRun:
    """Load the configuration of a named run of either kind: only those of `async-rl train` have a `method`."""
    return load_named(args) if read_key("method", args) is None else load_described(args)


def run(method: Method, line: CommandLine) -> int:
    from async_rl.cli.train_summary import write_summary
    from async_rl.launch import local

    config = load_training(method, line.config)
    return run_and_summarise(config, "train", partial(local.train, config, os.environ), partial(write_summary, config))


VERBS = tuple(
    Verb(words=f"train {method}", help=help, run=partial(run, method), config="@ FILE") for method, help in HELP.items()
)
