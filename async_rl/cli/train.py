"""`async-rl train METHOD`: which configuration its words describe, and the run that they start."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from async_rl.cli.first_lines import first_lines
from async_rl.config.loading import check_named, load_named, parse, read_key, resolve
from async_rl.config.training import METHODS, AnyRun, Method, TrainingConfig
from async_rl.errors import ConfigError
from async_rl.launch import local as local_run
from async_rl.launch.package_guard import guard

HELP: Mapping[Method, str] = {
    "sft": "Train a model on texts: prompts and answers, conversations, or plain text.",
    "dpo": "Train a model on pairs of a better and a worse answer.",
    "rm": "Train a reward model on such pairs.",
    "distill": "Train a model to say what a larger one would.",
}


def load_training(method: Method, args: Sequence[str]) -> TrainingConfig:
    """Raises ConfigError. A run without a name is called after its last file and the time."""
    config = _resolved(method, args)
    if config.run.name:
        return config
    files, _ = parse(args)
    name = f"{files[-1].stem if files else method}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return _resolved(method, [*args, "--run.name", name])


def _resolved(method: Method, args: Sequence[str]) -> TrainingConfig:
    return resolve(METHODS[method], args, example=f"configs/train/{method}.yaml").config


def load_described(args: Sequence[str]) -> TrainingConfig:
    """Of a run that has a name, and whose `method` says what it is."""
    found = read_key("method", args)
    for method in METHODS:
        if method == found:
            config = _resolved(method, args)
            check_named(config.run.name)
            return config
    said = "is not set" if found is None else f"{found!r} does not exist"
    raise ConfigError(f"method: {said}; a run of `async-rl train` has one of {', '.join(METHODS)}")


def load_any(args: Sequence[str]) -> AnyRun:
    """Of a run that has a name, whatever kind of run it is: only those of `async-rl train` have a method."""
    return load_named(args) if read_key("method", args) is None else load_described(args)


def run(method: Method, args: Sequence[str]) -> int:
    from async_rl.cli.train_summary import write_summary
    from async_rl.telemetry import configure_logs

    started = time.monotonic()
    guard()
    config = load_training(method, args)
    configure_logs("train")
    with local_run.sole_run(config):
        print(first_lines(config), flush=True)
        local_run.prepare_folder(config)
        code = asyncio.run(local_run.train(config, os.environ))
    if code == 0:
        from rich.console import Console

        write_summary(config, Console(), wall_s=time.monotonic() - started)
    return code
