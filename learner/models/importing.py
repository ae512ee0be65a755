"""`async-rl model import`: write a Hugging Face folder as a checkpoint of step 0, for a learner of any layout."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from async_rl.checkpoints.manifest import candidates
from async_rl.cli.grammar import CommandLine
from async_rl.cli.model import target
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.parameters.checkpoint_weights import save_checkpoint
from async_rl.megatron.parameters.table import table
from async_rl.models.families import family_of
from async_rl.models.hf_config import read_dtype, read_shape


def import_folder(line: CommandLine) -> None:
    folder, to = Path(line.operands[0]), Path(target(line))
    if line.has("like"):
        raise ConfigError("--like belongs to --format megatron; a Hugging Face folder has its own config.json and tokenizer")
    if found := candidates(to):
        raise ConfigError(f"{to} holds {found[0].name} already, which a learner would resume from; name another folder")
    shape, asked = read_shape(folder), line.text("dtype")
    dtype = getattr(torch, asked if asked is not None else read_dtype(folder))
    written = save_checkpoint(to, shape, load_folder(folder, shape, dtype))
    numbers = sum(prod(row.shape) for row in table(shape))
    print(f"{written}: {family_of(shape).name}, {numbers:,} parameters in {str(dtype).removeprefix('torch.')}")
