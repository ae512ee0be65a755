"""`async-rl model import --format megatron`: write a checkpoint of Megatron-LM as a Hugging Face folder."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch

from async_rl.cli.grammar import CommandLine
from async_rl.cli.model import shard_bytes, target
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.export import FolderExtras, write_folder
from async_rl.megatron.parameters.table import table
from async_rl.megatron.torch_dist.arguments import check_arguments, shape_of
from async_rl.megatron.torch_dist.reading import MegatronCheckpoint, open_checkpoint, read_weights
from async_rl.models.families import family_of
from async_rl.models.hf_config import read_config, read_shape
from async_rl.models.shape import ModelShape


def import_megatron(line: CommandLine) -> None:
    folder, to, named = Path(line.operands[0]), Path(target(line)), line.text("like")
    like = Path(named) if named is not None else None
    checkpoint = open_checkpoint(folder)
    shape = _shape(checkpoint, like)
    family, asked = family_of(shape), line.text("dtype")
    dtype: torch.dtype = getattr(torch, asked) if asked is not None else checkpoint.dtype
    weights = read_weights(checkpoint, shape)
    write_folder(to, shape, weights, dtype=dtype, shard_bytes=shard_bytes(line), extras=_extras(like))
    step = f"iteration {checkpoint.iteration} of " if checkpoint.iteration is not None else ""
    numbers = sum(prod(row.shape) for row in table(shape))
    print(f"{to}: {step}{folder} as {family.name}, {numbers:,} parameters in {str(dtype).removeprefix('torch.')}")
    if like is None:
        print("It has no tokenizer and no end tokens, which the checkpoint does not have; --like FOLDER takes them from there")


def _shape(checkpoint: MegatronCheckpoint, like: Path | None) -> ModelShape:
    """The model of a checkpoint: that of a folder with which its arguments must agree, or what they say alone."""
    where, arguments = str(checkpoint.folder), checkpoint.arguments
    if like is not None:
        shape = read_shape(like)
        if arguments:
            check_arguments(arguments, shape, checkpoint=where, config=str(like / "config.json"))
        return shape
    if not arguments:
        raise ConfigError(
            f"{where} does not have Megatron-LM's arguments (`args` in common.pt), which describe the model; name a Hugging "
            "Face folder of it: --like FOLDER"
        )
    try:
        shape = shape_of(arguments, vocab_size=checkpoint.vocabulary)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: its arguments do not describe a model ({error}); name a Hugging Face folder of it: --like FOLDER"
        ) from error
    check_arguments(arguments, shape, checkpoint=where, config=None)
    return shape


def _extras(like: Path | None) -> FolderExtras:
    if like is None:
        return FolderExtras()
    path = like / "generation_config.json"
    if path.is_file():
        generation = json.loads(path.read_text())
    else:
        found = read_config(like)
        generation = {name: found[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in found}
    return FolderExtras(tokenizer=HuggingFaceTokenizer(type="huggingface", folder=like), generation=generation)
