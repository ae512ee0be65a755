"""Copies of a model's full parameters, assembled from the parts that its ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rl.megatron.parameters.full_parameters import held_boxes
from async_rl.megatron.parameters.table import table
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import Box


def gather_full(model: nn.Module, shape: ModelShape) -> dict[str, Tensor] | None:
    """All full parameters, on rank 0; None on other ranks. Elements that no rank holds are NaN. Collective."""
    own = held_boxes(model, shape)
    by_rank: list[dict[Box, Tensor]] = [own]
    if dist.get_world_size() > 1:
        by_rank = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, own)
    if dist.get_rank() != 0:
        return None
    like = next(iter(own.values()))
    full = {row.name: torch.full(row.shape, torch.nan, dtype=like.dtype, device=like.device) for row in table(shape)}
    for box, part in ((box, part) for held in by_rank for box, part in held.items()):
        full[box.name][tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))] = part
    return full
