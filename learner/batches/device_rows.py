"""Packed rows as tensors on the device of a rank."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.model import packed_params
from learner.batches.packed_rows import DTYPES, PackedRow


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
        # copied because torch requires writable arrays
        columns = {name: torch.from_numpy(getattr(source, name).copy()).to(device, non_blocking=True) for name in DTYPES}
        columns |= {name: columns[name].long() for name in ("token_ids", "positions", "targets", "group_ids")}
        return DeviceRow(**columns, packing=packed_params(columns["cu_seqlens"], int(np.diff(source.cu_seqlens).max())))


_FILLER = PackedRow(**{name: np.arange(2 if name == "cu_seqlens" else 1, dtype=dtype) for name, dtype in DTYPES.items()})
"""Replaces an empty row: one token that is not trained, because the layers refuse rows of length 0."""
