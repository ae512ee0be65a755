"""Writes checkpoints of format torch_dist that Megatron-LM loads."""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from async_rl.megatron import host
from async_rl.megatron.huggingface.export import FolderExtras, whole_folder, write_extras
from async_rl.megatron.parameters.table import table
from async_rl.megatron.torch_dist.arguments import written_arguments
from async_rl.megatron.torch_dist.keys import extra_states, places
from async_rl.megatron.torch_dist.reading import FORMAT, RELEASE, TRACKER, first_failure
from async_rl.models.hf_config import written_config
from async_rl.models.shape import ModelShape

DESCRIPTION = "huggingface"
"""Folder beside the weights with config.json and the tokenizer."""


def write_checkpoint(
    folder: Path,
    shape: ModelShape,
    weights: MutableMapping[str, Tensor],
    *,
    dtype: torch.dtype,
    iteration: int,
    extras: FolderExtras,
) -> None:
    """Write full parameters, which are taken out of `weights`, as a checkpoint without optimizer state. Raises ConfigError when
    the folder exists or cannot be written.
    """
    name = str(dtype).removeprefix("torch.")
    tokenizer = str((folder / DESCRIPTION).absolute())
    arguments = written_arguments(shape, dtype=name, iteration=iteration, tokenizer=tokenizer)
    with whole_folder(folder) as partial:
        for each in (RELEASE, DESCRIPTION):
            (partial / each).mkdir()
        _write_weights(partial / RELEASE, shape, weights, dtype)
        common = {
            "args": argparse.Namespace(**arguments, params_dtype=dtype),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
        }
        pickled = io.BytesIO()
        torch.save(common, pickled)
        (partial / RELEASE / "common.pt").write_bytes(pickled.getvalue())
        (partial / RELEASE / "metadata.json").write_text(json.dumps(FORMAT))
        write_extras(partial / DESCRIPTION, written_config(shape, dtype=name), extras)
        (partial / TRACKER).write_text(RELEASE)


def _write_weights(folder: Path, shape: ModelShape, weights: MutableMapping[str, Tensor], dtype: torch.dtype) -> None:
    parts: dict[str, list[str]] = {}
    content: dict[str, Any] = {}
    leading: dict[str, tuple[int, ...]] = {}
    for row in table(shape):
        place = places(row, shape)[0]
        parts.setdefault(place.key, []).append(row.name)
        leading[place.key] = place.of
        content |= {key: [None] for key in extra_states(row, shape)}
    for key, names in parts.items():
        assert len(names) == math.prod(leading[key]), key  # in the table's order: by layer, then by expert
        tensors = [weights.pop(name).to(dtype) for name in names]
        content[key] = torch.stack(tensors).view(*leading[key], *tensors[0].shape) if leading[key] else tensors[0].contiguous()
    try:
        with host.quiet():  # torch warns that it works in one process, even if it was asked to
            save(
                content,
                storage_writer=FileSystemWriter(folder),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                no_dist=True,
            )
    except CheckpointException as error:
        raise OSError(str(first_failure(error))) from error
