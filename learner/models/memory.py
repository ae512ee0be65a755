"""GPU memory needed to train a model under simple parallel layouts, without activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from async_rl.megatron.parameters.table import Parameter, Split, table
from async_rl.models.shape import ModelShape

HELD_BYTES = 2 + 4
"""Bytes per parameter on a rank: a bfloat16 weight and its float32 gradient."""
SHARED_BYTES = 4 + 4 + 4
"""Bytes per parameter, sharded over data-parallel ranks: a float32 weight and Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data-parallel alone"


def layouts(shape: ModelShape) -> Iterator[MemoryLayout]:
    """Yield the layouts that the model's sizes allow."""
    yield MemoryLayout(gpus=1)
    for gpus in (2, 4, 8):
        yield MemoryLayout(gpus=gpus)
        if shape.kv_heads % gpus == shape.ffn % gpus == 0:
            yield MemoryLayout(gpus=gpus, tensor=gpus)
        if shape.layers % gpus == 0:
            yield MemoryLayout(gpus=gpus, pipeline=gpus)
        if shape.experts is not None and shape.experts.number % gpus == 0:
            yield MemoryLayout(gpus=gpus, expert=gpus)


def bytes_of(shape: ModelShape, division: MemoryLayout) -> int:
    """Return the bytes per rank of the pipeline stage that needs most."""
    stages = [0.0] * division.pipeline
    for row in table(shape):
        stages[_stage_of(row, shape, division)] += _bytes_of(row, division)
    return round(max(stages))


def _bytes_of(row: Parameter, division: MemoryLayout) -> float:
    of_a_stage = division.gpus // division.pipeline
    if row.expert is not None:
        return prod(row.shape) / division.expert * (HELD_BYTES + SHARED_BYTES / (of_a_stage // division.expert))
    parts = 1 if row.split is Split.WHOLE else division.tensor
    return prod(row.shape) / parts * (HELD_BYTES + SHARED_BYTES / (of_a_stage // division.tensor))


def _stage_of(row: Parameter, shape: ModelShape, division: MemoryLayout) -> int:
    if row.layer is not None:
        return row.layer * division.pipeline // shape.layers
    return 0 if row.name.startswith("embedding") else division.pipeline - 1
