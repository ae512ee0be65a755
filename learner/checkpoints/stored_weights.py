"""Read a checkpoint's weights as one rank's part of a version: box by box while packing, without loading the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, check_files, read_manifest
from async_rl.megatron.parameters.pieces import Pieces, check_model, open_pieces
from async_rl.megatron.parameters.table import table
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import Box


@contextmanager
def stored_weights(checkpoint: Path, shape: ModelShape, boxes: Collection[Box]) -> Iterator[Mapping[Box, Tensor]]:
    """Open weights by box. Each rank verifies its share of the files. Raises DamagedCheckpoint or CheckpointError."""
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest, sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    check_model(checkpoint, manifest, POLICY, shape)
    with open_pieces(checkpoint, manifest) as pieces:
        yield _Stored(pieces, shape, boxes)


class _Stored(Mapping[Box, Tensor]):
    def __init__(self, pieces: Pieces, shape: ModelShape, boxes: Collection[Box]) -> None:
        self._pieces, self._boxes = pieces, boxes
        self._rows = {row.name: row for row in table(shape)}

    def __getitem__(self, box: Box) -> Tensor:
        part = tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
        return self._pieces.full(POLICY, self._rows[box.name])[part]

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)
