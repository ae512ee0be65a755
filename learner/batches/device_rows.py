"""Packed rows as tensors on the device of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.model import packed_params
from learner.batches.packed_rows import DTYPES, PackedRow

_ALIGNMENT = 64
"""Bytes to which columns are aligned in a buffer, enough for any dtype and kernel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRow:
    """[T] tokens in [S] sequences, aligned as in PackedRow. Fields that are None were not computed."""

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    """Not 0 where the target is trained."""
    cu_seqlens: Tensor
    packing: RowPacking
    reference: Tensor | None = None
    """Log-probabilities of the targets under the reference model."""

    @property
    def is_filler(self) -> bool:
        """A row of one token predicts nothing."""
        return len(self.token_ids) == 1

    def as_filler(self) -> Self:
        """Return a row of one untrained token that has the same columns, to fill up a schedule."""
        columns = {
            each.name: column.new_zeros(1)
            for each in fields(self)
            if isinstance(column := getattr(self, each.name), Tensor) and each.name != "cu_seqlens"
        }
        cu_seqlens = self.cu_seqlens.new_tensor([0, 1])
        return replace(self, **columns, cu_seqlens=cu_seqlens, packing=packed_params(cu_seqlens, 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceRow(ModelRow):
    """A row of rollouts."""

    behaviour: Tensor
    advantages: Tensor
    rewards: Tensor
    ages: Tensor
    group_ids: Tensor
    proximal: Tensor | None = None
    """Log-probabilities of the targets under the policy before the step's first update."""
    teacher: Tensor | None = None
    """The same under the teacher."""
    values: Tensor | None = None
    """The critic's values before the step's first update."""
    returns: Tensor | None = None

    @staticmethod
    def on_device(source: PackedRow, device: torch.device) -> DeviceRow:
        if len(source.token_ids) == 0:
            source = _FILLER
        columns = moved({name: getattr(source, name) for name in DTYPES}, device)
        columns |= {name: columns[name].long() for name in ("token_ids", "positions", "targets", "group_ids")}
        return DeviceRow(**columns, packing=packed_params(columns["cu_seqlens"], int(np.diff(source.cu_seqlens).max())))


_FILLER = PackedRow(**{name: np.arange(2 if name == "cu_seqlens" else 1, dtype=dtype) for name, dtype in DTYPES.items()})
"""Replaces an empty row: one token that is not trained, because the layers refuse rows of length 0."""


def moved(columns: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy columns to a device together: from one buffer, which is pinned for a GPU, so that the host need not wait."""
    places: dict[str, slice] = {}
    end = 0
    for name, column in columns.items():
        places[name] = slice(end, end + column.nbytes)
        end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_host = buffer.numpy()
    for name, column in columns.items():
        on_host[places[name]] = column.view(np.uint8)
    on_device = buffer.to(device, non_blocking=True)
    return {name: on_device[places[name]].view(_dtype(column.dtype)) for name, column in columns.items()}


@cache
def _dtype(of: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, of)).dtype
