"""`async-rl rehearse`: check a configuration, then play it in small: steps, evaluation, checkpoint, export."""

from __future__ import annotations

import asyncio
import os
import subprocess

from async_rl.cli.config import GPUS, check
from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.run import made_up_name
from async_rl.config.loading import load_with_origins
from async_rl.errors import ConfigError
from async_rl.launch.commands import Role, command

STEPS = 2


def rehearse(line: CommandLine) -> int:
    from async_rl.config.pretrained import described
    from async_rl.launch import local
    from async_rl.launch.rehearsal import rehearsed
    from async_rl.telemetry import configure_logs
    from async_rl.tokenization.tokenizers import has_tokenizer

    config = load_with_origins(line.config).config
    source = described(config.model)
    check(line)
    folder = (config.run.folder / made_up_name(line.config, "run").replace(".", "_")).absolute()
    folder = folder.with_name(f"rehearsal-{folder.name}")
    model = folder / "model"
    if source.folder is not None:
        print(f"\nrehearsal: writes a small model of the same family to {model}", flush=True)
        _finish("learner.models.shrinking", str(source.folder), str(model))
    steps = line.integer("steps", STEPS)
    small, stand_ins = rehearsed(config, model, folder, steps=steps, processes=len(os.sched_getaffinity(0)))
    if source.folder is not None and not has_tokenizer(source.folder):
        stand_ins.append(f"tokenizer: one of bytes stands in for that of {config.model.name}, which is not in the Hub's cache")
    for each in stand_ins:
        print(f"rehearsal: {each}")
    configure_logs("rehearse")
    with local.sole_run(small):
        file = local.prepare_folder(small)
        if code := asyncio.run(local.run(small, os.environ)):
            return code
    if source.folder is not None:
        _finish("learner.models", "export", "@", str(file), "--to", str(folder / "exported"))
    print(f"rehearsal: {steps} steps, an evaluation, a checkpoint and an export worked: {folder}")
    return 0


def _finish(role: Role, *words: str) -> None:
    if subprocess.run(command(role, words), check=False).returncode:
        raise ConfigError("the rehearsal ends here, see above")


VERBS = (
    Verb(
        words="rehearse",
        help="Check a configuration, then play it on this CPU with a small model: two steps, evaluation, checkpoint, export.",
        run=rehearse,
        config="@ FILE",
        options=(GPUS, Option(name="steps", value="N", read=int, least=1, help=f"steps to train ({STEPS})")),
    ),
)
