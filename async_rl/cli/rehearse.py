"""`async-rl rehearse`: check a configuration, then play it in small: steps, evaluation, checkpoint, export."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.cli.config import GPUS, check
from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.run import made_up_name
from async_rl.cli.train import resolve_any
from async_rl.errors import ConfigError
from async_rl.launch.commands import Role, command

if TYPE_CHECKING:
    from async_rl.config.training import AnyRun
    from async_rl.launch.rehearsal import SmallModel

STEPS = 2


def rehearse(line: CommandLine) -> int:
    from async_rl.config import Config
    from async_rl.launch import local
    from async_rl.launch.rehearsal import rehearsed, rehearsed_training
    from async_rl.telemetry import configure_logs, read_rows

    config = resolve_any(line.config).config
    check(line)
    folder = (config.run.folder / made_up_name(line.config, "run").replace(".", "_")).absolute()
    folder = folder.with_name(f"rehearsal-{folder.name}")
    if config.model.size is None and (code := _shrink(config, folder / "model")):
        return code
    small, stand_ins = (None, []) if config.model.size is not None else _small_model(config, folder / "model")
    steps, processes = line.integer("steps", STEPS), len(os.sched_getaffinity(0))
    if isinstance(config, Config):
        run, rows = rehearsed(config, small, folder, steps=steps, processes=processes)
    else:
        run, rows = rehearsed_training(config, small, folder, steps=steps, processes=processes)
    for each in dict.fromkeys([*stand_ins, *rows]):
        print(f"rehearsal: {each}", flush=True)
    configure_logs("rehearse")
    with local.sole_run(run):
        file = local.prepare_folder(run)
        play = local.run(run, os.environ) if isinstance(run, Config) else local.train(run, os.environ)
        if code := asyncio.run(play):
            return code
    worked = ["a checkpoint"]
    if isinstance(run, Config):
        metrics = read_rows(folder / "metrics.jsonl")
        if not any(key.startswith("eval/") for row in metrics for key in row.values):
            raise ConfigError(f"the rehearsal's evaluation did not end, see {folder / 'logs' / 'evaluator.log'}")
        worked = ["an evaluation", *worked]
    if small is not None and (isinstance(run, Config) or run.head == "tokens"):  # scores are served, not exported
        if code := _finished("learner.models", "export", "@", str(file), "--to", str(folder / "exported")):
            return code
        worked = [*worked, "an export"]
    print(f"rehearsal: {steps} steps, {', '.join(worked[:-1])}{' and ' if worked[1:] else ''}{worked[-1]} worked: {folder}")
    return 0


def _shrink(config: AnyRun, to: Path) -> int:
    """Write a small model of the same family, and return the exit code."""
    from async_rl.config.pretrained import described

    print(f"\nrehearsal: writes a small model of the same family to {to}", flush=True)
    return _finished("learner.models.shrinking", str(described(config.model).place), str(to))


def _small_model(config: AnyRun, to: Path) -> tuple[SmallModel, list[str]]:
    """Return the small model, and what stands in for its tokenizer."""
    from async_rl.config.hub.snapshot import NotReachable
    from async_rl.config.pretrained import described
    from async_rl.config.tokenizer import HuggingFaceTokenizer
    from async_rl.launch.rehearsal import SmallModel
    from async_rl.models.hf_config import read_shape
    from async_rl.tokenization.tokenizers import has_tokenizer

    positions = read_shape(described(config.model).place).max_positions
    if not isinstance(config.tokenizer, HuggingFaceTokenizer):
        return SmallModel(folder=to, tokenizer=to, positions=positions), []
    try:
        own = described(config.tokenizer).place
        if has_tokenizer(own) or not config.tokenizer.name:
            return SmallModel(folder=to, tokenizer=own, positions=positions), []
    except NotReachable:
        pass
    said = f"a tokenizer of bytes stands in for that of {config.tokenizer.name}, which is not in the Hub's cache"
    return SmallModel(folder=to, tokenizer=to, positions=positions), [said]


def _finished(role: Role, *words: str) -> int:
    """Run a role to its end and return its exit code; it says itself what is wrong."""
    return subprocess.run(command(role, words), check=False).returncode


VERBS = (
    Verb(
        words="rehearse",
        help="Check a configuration, then play it on this CPU with a small model: two steps, evaluation, checkpoint, export.",
        run=rehearse,
        config="@ FILE",
        options=(GPUS, Option(name="steps", value="N", read=int, least=1, help=f"steps to train ({STEPS})")),
    ),
)
