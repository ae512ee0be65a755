"""`async-rl model import | export | inspect`; learner/models does the work."""

from __future__ import annotations

import re
from typing import NoReturn

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.errors import ConfigError
from async_rl.launch.commands import command


def run(line: CommandLine) -> NoReturn:
    become(command("learner.models", [*line.verb.words.split()[1:], *line.words]))


DTYPES = ("float32", "bfloat16", "float16")
MERGED, PEFT, MEGATRON = "merged", "peft", "megatron"
HUGGINGFACE = "huggingface"
_DTYPE = Option(name="dtype", value="DTYPE", choices=DTYPES, help="precision of the written weights (default: unchanged)")

IMPORT = Verb(
    words="model import",
    run=run,
    operands="FOLDER",
    help="Check a Hugging Face folder and write it as a checkpoint from which a learner of any layout can start.",
    options=(
        Option(
            name="to",
            value="FOLDER",
            help="checkpoint folder of a run, for example runs/NAME/checkpoints; with --format megatron, a Hugging Face folder",
        ),
        _DTYPE,
        Option(
            name="format",
            value="FORMAT",
            choices=(HUGGINGFACE, MEGATRON),
            help="what FOLDER is; a checkpoint of Megatron-LM (torch_dist) becomes a Hugging Face folder (huggingface)",
        ),
        Option(
            name="like",
            value="FOLDER",
            help="with --format megatron: Hugging Face folder of the same model, for its config.json and tokenizer",
        ),
    ),
    config="",
)
EXPORT = Verb(
    words="model export",
    run=run,
    help="Write a run's checkpoint as a Hugging Face folder, or as a checkpoint of Megatron-LM.",
    options=(
        Option(name="to", value="FOLDER", help="the folder to write; must not exist"),
        Option(name="checkpoint", value="PATH", help="a checkpoint, or a folder of checkpoints (default: the run's newest)"),
        _DTYPE,
        Option(
            name="format",
            value="FORMAT",
            choices=(MERGED, PEFT, MEGATRON),
            help="a Hugging Face folder, adapters alone as PEFT opens them, or a checkpoint of Megatron-LM (merged)",
        ),
        Option(name="max-shard-size", value="SIZE", help="maximum size of one file, for example 500MB (4GB)"),
    ),
)
INSPECT = Verb(
    words="model inspect",
    run=run,
    operands="FOLDER",
    help="Describe a Hugging Face folder or a checkpoint: sizes, what is not supported, memory needed for training.",
    config="",
)
VERBS = (IMPORT, EXPORT, INSPECT)

NEWEST = "newest"


def target(line: CommandLine) -> str:
    """The value of --to. Raises ConfigError without one."""
    if (to := line.text("to")) is None:
        raise ConfigError(f"{line.verb.words} needs a folder to write to: --to FOLDER")
    return to


def shard_bytes(line: CommandLine) -> int:
    """`--max-shard-size` in bytes; 1 KB is 1000 bytes, as in Hugging Face."""
    text = line.text("max-shard-size", "4GB")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.lower())
    size = float(found[1]) * 1000 ** " kmgt".index(found[2] if found[2] else " ") if found else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} is no size; write for example 500MB or 4GB")
    return int(size)
