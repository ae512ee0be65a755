"""`async-rl train METHOD`, and loading the configuration of any kind of run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial

from async_rl.cli.first_lines import first_lines
from async_rl.cli.grammar import CommandLine, Verb
from async_rl.cli.run import made_up_name
from async_rl.config.loading import check_named, load_named, read_key, resolve
from async_rl.config.training import METHODS, AnyRun, Method, TrainingConfig
from async_rl.errors import ConfigError
from async_rl.launch import local as local_run

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
    return resolve(METHODS[method], args, example=f"configs/train/{method}.yaml").config


def load_described(args: Sequence[str]) -> TrainingConfig:
    """Load the configuration of a named training run, whose `method` key says which kind it is."""
    found = read_key("method", args)
    for method in METHODS:
        if method == found:
            config = _resolved(method, args)
            check_named(config.run.name)
            return config
    said = "is not set" if found is None else f"{found!r} does not exist"
    raise ConfigError(f"method: {said}; a run of `async-rl train` has one of {', '.join(METHODS)}")


def load_any(args: Sequence[str]) -> AnyRun:
    """Load the configuration of a named run of either kind: only those of `async-rl train` have a `method`."""
    return load_named(args) if read_key("method", args) is None else load_described(args)


def run(method: Method, line: CommandLine) -> int:
    from async_rl.cli.train_summary import write_summary
    from async_rl.telemetry import configure_logs

    started = time.monotonic()
    config = load_training(method, line.config)
    configure_logs("train")
    with local_run.sole_run(config):
        print(first_lines(config), flush=True)
        local_run.prepare_folder(config)
        code = asyncio.run(local_run.train(config, os.environ))
    if code == 0:
        from rich.console import Console

        write_summary(config, Console(), wall_s=time.monotonic() - started)
    return code


VERBS = tuple(
    Verb(words=f"train {method}", help=help, run=partial(run, method), config="@ FILE") for method, help in HELP.items()
)
