"""Read a checkpoint's weights as one rank's part of a version: box by box while packing, without loading the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, check_files, read_manifest
from async_rl.megatron.parameters.full_parameters import boxes_of, tensor_rank
from async_rl.megatron.parameters.pieces import Pieces, check_model, open_pieces
from async_rl.megatron.parameters.table import Parameter, table
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
        yield _Stored(pieces, shape, model.held()) if model.adapters is None else _Merged(pieces, shape, model)


class _Stored(Mapping[Box, Tensor]):
    def __init__(self, pieces: Pieces, shape: ModelShape, held: Mapping[Box, Tensor]) -> None:
        self._pieces, self._held = pieces, held
        self._rows = {row.name: row for row in table(shape)}

    def __getitem__(self, box: Box) -> Tensor:
        part = tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
        return self._full(self._rows[box.name])[part]

    def __iter__(self) -> Iterator[Box]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _full(self, row: Parameter) -> Tensor:
        return self._pieces.full(POLICY, row)


class _Merged(_Stored):
    """The base that the rank holds, merged with stored adapters."""

    def __init__(self, pieces: Pieces, shape: ModelShape, model: TrainingModel) -> None:
        super().__init__(pieces, shape, model.held())
        self._adapted = model.adapted

    def __getitem__(self, box: Box) -> Tensor:
        if (weight := self._adapted.get(box.name)) is None:
            return self._held[box]
        return dict(boxes_of(self._rows[box.name], weight.merged_with(self._full), *tensor_rank()))[box]
