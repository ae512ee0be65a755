"""Reads and writes the weights of a checkpoint as full parameters, without optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from async_rl.checkpoints.draft import Draft
from async_rl.checkpoints.manifest import (
    FORMAT,
    POLICY,
    WEIGHT,
    DamagedCheckpoint,
    Layout,
    Manifest,
    ModelFacts,
    check_files,
    file_of,
)
from async_rl.errors import CheckpointError
from async_rl.megatron.parameters.full_parameters import check_complete
from async_rl.megatron.parameters.pieces import Stretch, check_model, open_pieces, parameters_of
from async_rl.megatron.parameters.table import table
from async_rl.models.safetensors import divide
from async_rl.models.shape import ModelShape

SHARD_BYTES = 4 << 30
"""Maximum size of one written file, and so of the weights in memory at once."""


def load_checkpoint(checkpoint: Path, manifest: Manifest, shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """The policy's full parameters by canonical name. Raises CheckpointError if damaged or of another model."""
    check_model(checkpoint, manifest, POLICY, shape)
    try:
        check_files(checkpoint, manifest, manifest.files)
        with open_pieces(checkpoint, manifest) as pieces:
            return {row.name: pieces.full(POLICY, row).to(dtype) for row in table(shape)}
    except DamagedCheckpoint as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}") from error


def save_checkpoint(root: Path, shape: ModelShape, tensors: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint of step 0, from which a learner starts with a new optimizer. Raises CheckpointError."""
    check_complete(shape, tensors)
    draft = Draft.of(root, step=0)
    try:
        _write(draft, shape, tensors, shard_bytes)
    except OSError as error:
        draft.discard()
        raise CheckpointError(f"{root} cannot be written: {error}") from error
    return draft.final


def _write(draft: Draft, shape: ModelShape, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    draft.open()
    rows = {row.name: row for row in table(shape)}
    sizes = {name: 4 * math.prod(row.shape) for name, row in rows.items()}
    files = {
        file_of(number): draft.write(
            number, {Stretch.whole(rows[name], 0, 1).key(POLICY, WEIGHT): tensors[name].cpu().flatten() for name in names}
        )
        for number, names in enumerate(divide(sizes, shard_bytes))
    }
    model = ModelFacts(updates=0, parameters=parameters_of(shape))
    draft.commit(Manifest(format=FORMAT, step=0, layout=Layout(), models={POLICY: model}, files=files, extra={}))
