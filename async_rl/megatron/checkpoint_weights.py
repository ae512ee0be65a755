"""A learner's checkpoint as full parameters, whatever the ranks that wrote it: the model without its optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from async_rl.checkpoint_files import Damaged, Layout, Manifest, check_file, file_of
from async_rl.errors import CheckpointError
from async_rl.megatron.parameters import check_complete, join, table
from async_rl.model_shape import ModelShape

PREFIX = "weights."
"""Under which each rank's file holds its part of the model; the rest of the file is for the learner alone."""


def load_checkpoint(checkpoint: Path, manifest: Manifest, shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Full parameters under canonical names. Raises CheckpointError when they are damaged or another model's."""
    found: dict[str, Tensor] = {}
    try:
        for stage in range(manifest.layout.pipeline):
            slices = [
                _read(checkpoint, manifest, rank_of(manifest.layout, tensor, stage)) for tensor in range(manifest.layout.tensor)
            ]
            for row in table(shape):
                if row.name in slices[0] and row.name not in found:  # a tied embedding stands on two stages
                    found[row.name] = join([each[row.name] for each in slices], row.split, row.shape).to(dtype)
    except Damaged as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}") from error
    try:
        check_complete(shape, found)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {checkpoint} belongs to another model: {error}; use its `model` section") from error
    return found


def rank_of(layout: Layout, tensor: int, stage: int) -> int:
    """The first data-parallel rank that holds this slice: Megatron counts tensor ranks first, then data, then stages."""
    return tensor + stage * layout.tensor * layout.data


def _read(checkpoint: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    path = checkpoint / file_of(rank)
    check_file(path, manifest)
    try:
        with safe_open(path, framework="pt") as opened:
            return {name.removeprefix(PREFIX): opened.get_tensor(name) for name in opened.keys() if name.startswith(PREFIX)}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from error
