"""Operations on all gradients at once, where Megatron has neither Transformer Engine nor Apex.

Megatron's own stand-ins loop over the parameters, and for the norm wait for the device at each. `install` replaces them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron import host


def l2_norm(_chunk: int, _noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: object) -> tuple[Tensor, None]:
    """Return the norm of all tensors of the list as one number on their device, without waiting for it."""
    (tensors,) = lists
    norms = torch._foreach_norm([*tensors])  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms)).float()[None], None


def scale(_chunk: int, _noop: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Multiply tensors in place. Megatron gives the list twice, as what is read and what is written."""
    if targets := [*lists[1]]:
        torch._foreach_mul_(targets, factor)  # pyright: ignore[reportPrivateImportUsage]


def copy(this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy tensors, rounding where they differ in dtype."""
    if targets := [*that]:
        torch._foreach_copy_(targets, [*this])  # pyright: ignore[reportPrivateImportUsage]


def install() -> None:
    """Replace Megatron's loops; kernels of Transformer Engine and Apex stay."""
    with host.importing():
        clipping, optimizing, stand_ins = (
            vars(importlib.import_module(f"megatron.core.{name}"))
            for name in ("optimizer.clip_grads", "optimizer.optimizer", "utils")
        )
    _replace(clipping, "l2_norm_impl", stand_ins["local_multi_tensor_l2_norm"], l2_norm)
    _replace(clipping, "multi_tensor_scale_impl", stand_ins["local_multi_tensor_scale"], scale)
    if optimizing["multi_tensor_scale_impl"] is stand_ins["local_multi_tensor_scale"]:
        optimizing["_multi_tensor_copy_this_to_that"] = copy


def _replace(module: dict[str, Any], name: str, stand_in: object, ours: object) -> None:
    if module[name] is stand_in:
        module[name] = ours
