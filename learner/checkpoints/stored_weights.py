"""Read a checkpoint's weights as one rank's part of a version: box by box while packing, without loading the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, check_files, read_manifest
from async_rl.config.learner import LoraConfig
from async_rl.megatron.lora import factors_by_matrix, merge
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.pieces import Pieces, check_model, open_pieces
from async_rl.megatron.parameters.table import table
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import Box
from learner.model import TrainingModel


@contextmanager
def stored_weights(checkpoint: Path, shape: ModelShape, model: TrainingModel) -> Iterator[Mapping[Box, Tensor]]:
    """Open weights by the boxes that `model` holds; adapters are merged with its base. Each rank verifies its share of files.

    Raises DamagedCheckpoint or CheckpointError.
    """
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest, sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    check_model(checkpoint, manifest, POLICY, shape, adapters=model.adapters)
    with open_pieces(checkpoint, manifest) as pieces:
        boxes = model.held_base()
        yield _Stored(pieces, shape, boxes) if model.adapters is None else _Merged(pieces, shape, boxes, model.adapters.lora)


class _Stored(Mapping[Box, Tensor]):
    def __init__(self, pieces: Pieces, shape: ModelShape, boxes: Mapping[Box, Tensor]) -> None:
        self._pieces, self._shape, self._boxes = pieces, shape, boxes
        self._rows = {row.name: row for row in table(shape)}

    def __getitem__(self, box: Box) -> Tensor:
        return _cut(self._pieces.full(POLICY, self._rows[box.name]), box)

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)


class _Merged(_Stored):
    """The base that the rank holds, merged with stored adapters."""

    def __init__(self, pieces: Pieces, shape: ModelShape, boxes: Mapping[Box, Tensor], lora: LoraConfig) -> None:
        super().__init__(pieces, shape, boxes)
        trained = {row.name: pieces.full(POLICY, row) for row in trained_rows(shape, lora)}
        self._factors, self._scale = factors_by_matrix(trained, shape, lora), lora.scale

    def __getitem__(self, box: Box) -> Tensor:
        base = self._boxes[box]
        if (factors := self._factors.get(box.name)) is None:
            return base
        added = merge(torch.zeros(self._rows[box.name].shape), factors, self._shape, self._scale)
        return (base.float() + _cut(added, box).to(base.device)).to(base.dtype)


def _cut(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))]
