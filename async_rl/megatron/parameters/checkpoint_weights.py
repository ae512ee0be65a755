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
    AdapterFacts,
    DamagedCheckpoint,
    Layout,
    Manifest,
    ModelFacts,
    check_files,
    file_of,
)
from async_rl.errors import CheckpointError
from async_rl.megatron.base_weights import base_weights
from async_rl.megatron.lora import factors_by_matrix, merge
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.full_parameters import check_complete
from async_rl.megatron.parameters.pieces import Stretch, check_model, open_pieces, parameters_of
from async_rl.megatron.parameters.table import table
from async_rl.models.safetensors import divide
from async_rl.models.shape import ModelShape

SHARD_BYTES = 4 << 30
"""Maximum size of one written file, and so of the weights in memory at once."""


def load_checkpoint(
    checkpoint: Path, manifest: Manifest, shape: ModelShape, dtype: torch.dtype, *, base: Path | None = None
) -> dict[str, Tensor]:
    """The policy's full parameters by canonical name; adapters are merged with their base.

    `base`: the folder of the base, if it is not where it was when the checkpoint was written. Raises CheckpointError if damaged
    or of another model.
    """
    if (facts := facts_of_adapters(manifest)) is None:
        return load_trained(checkpoint, manifest, shape, dtype)
    trained = load_trained(checkpoint, manifest, shape, torch.float32)
    weights = base_weights(facts, shape, dtype, folder=base)
    factors = factors_by_matrix(trained, shape, facts.lora)
    return {
        row.name: trained[row.name].to(dtype)
        if row.name in trained
        else merge(weights[row.name], factors.get(row.name, {}), shape, facts.lora.scale)
        for row in table(shape)
    }


def load_trained(checkpoint: Path, manifest: Manifest, shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """The policy's full parameters that were trained: all, or adapters and a value head. Raises CheckpointError."""
    facts = facts_of_adapters(manifest)
    check_model(checkpoint, manifest, POLICY, shape, adapters=facts)
    rows = trained_rows(shape, facts.lora if facts is not None else None)
    try:
        check_files(checkpoint, manifest, manifest.files)
        with open_pieces(checkpoint, manifest) as pieces:
            return {row.name: pieces.full(POLICY, row).to(dtype) for row in rows}
    except DamagedCheckpoint as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}") from error


def facts_of_adapters(manifest: Manifest) -> AdapterFacts | None:
    """The adapters of a checkpoint's policy; None if all weights were trained."""
    policy = manifest.models.get(POLICY)
    return policy.adapters if policy is not None else None


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
    model = ModelFacts(updates=0, parameters=parameters_of(rows.values()))
    draft.commit(Manifest(format=FORMAT, step=0, layout=Layout(), models={POLICY: model}, files=files, extra={}))
