"""Packed rows as tensors on the device of a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron.compat import PackedSeqParams
from async_rl.megatron.model import packed_params
from learner.batches.batch import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceRow:
    """[T] tokens in [S] sequences, as in PackedRow. Fields that are None were not computed."""

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    rewards: Tensor
    ages: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor
    packing: PackedSeqParams
    proximal: Tensor | None = None
    """Log-probabilities of the targets under the policy before the step's first update."""
    reference: Tensor | None = None
    """The same under the reference policy."""
    teacher: Tensor | None = None
    """The same under the teacher."""
    values: Tensor | None = None
    """The critic's values before the step's first update."""
    returns: Tensor | None = None

    @staticmethod
    def on_device(source: PackedRow, device: torch.device) -> DeviceRow:
        if len(source.token_ids) == 0:
            source = _FILLER

        def moved(array: np.ndarray) -> Tensor:
            # copied because torch requires writable arrays
            return torch.from_numpy(array.copy()).to(device, non_blocking=True)

        cu_seqlens = moved(source.cu_seqlens)
        return DeviceRow(
            token_ids=moved(source.token_ids).long(),
            positions=moved(source.positions).long(),
            targets=moved(source.targets).long(),
            mask=moved(source.mask),
            behaviour=moved(source.behaviour),
            advantages=moved(source.advantages),
            rewards=moved(source.rewards),
            ages=moved(source.ages),
            cu_seqlens=cu_seqlens,
            group_ids=moved(source.group_ids).long(),
            packing=packed_params(cu_seqlens, int(np.diff(source.cu_seqlens).max())),
        )

    def as_filler(self) -> DeviceRow:
        """Return a row without trained tokens that has the same computed columns."""
        nothing = DeviceRow.on_device(_FILLER, self.mask.device)
        more = {name: self.behaviour.new_zeros(1) for name in _COMPUTED if getattr(self, name) is not None}
        return replace(nothing, **more)


_COMPUTED = ("proximal", "reference", "teacher", "values", "returns")
_FILLER = PackedRow(
    token_ids=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    targets=np.zeros(1, np.int32),
    mask=np.zeros(1, np.uint8),
    behaviour=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    rewards=np.zeros(1, np.float32),
    ages=np.zeros(1, np.int32),
    cu_seqlens=np.array([0, 1], np.int32),
    group_ids=np.zeros(1, np.int32),
)
"""Replaces an empty row: one token that is not trained, because the layers refuse rows of length 0."""
