"""What people can type after `async-rl model`: models in and out of Hugging Face folders, and what they are."""

from __future__ import annotations

import re

from async_rl.cli.grammar import Line, Option, Tool
from async_rl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE = Option(name="dtype", value="DTYPE", choices=DTYPES, help="of the weights; theirs, if not given")

IMPORT = Tool(
    words="model import",
    operands="FOLDER",
    help="Check a Hugging Face folder, and write it as a checkpoint that a learner begins from, however its ranks are divided.",
    options=(
        Option(name="to", value="FOLDER", help="the checkpoints of a run, for example runs/NAME/checkpoints"),
        _DTYPE,
    ),
    describes_run=False,
)
EXPORT = Tool(
    words="model export",
    help="Write a run's checkpoint as a Hugging Face folder.",
    options=(
        Option(name="to", value="FOLDER", help="a folder that does not exist yet"),
        Option(name="checkpoint", value="PATH", help="a checkpoint, or a folder of them (newest)"),
        _DTYPE,
        Option(name="max-shard-size", value="SIZE", help="of one file, for example 500MB (4GB)"),
    ),
)
INSPECT = Tool(
    words="model inspect",
    operands="FOLDER",
    help="Say what a Hugging Face folder or a checkpoint holds, what of it is not supported, and what training it needs.",
    describes_run=False,
)
TOOLS = (IMPORT, EXPORT, INSPECT)

NEWEST = "newest"


def target(line: Line) -> str:
    """Where the line wants to write."""
    if (to := line.text("to")) is None:
        raise ConfigError(f"{line.tool.typed} needs to know where to write: --to FOLDER")
    return to


def part_bytes(line: Line) -> int:
    """`--max-shard-size` in bytes. As everywhere in these folders, a kilobyte is a thousand."""
    text = line.text("max-shard-size")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", (text if text is not None else "4GB").lower())
    size = float(found[1]) * 1000 ** " kmgt".index(found[2] if found[2] else " ") if found else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} is no size; write for example 500MB or 4GB")
    return int(size)
