"""Matrix products whose results are at least float32, also of half-precision matrices, which are not rounded in between."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor(matrix: Tensor) -> Tensor:
    """What the others take: a CPU has no product of half-precision numbers with a float32 result."""
    return matrix.to(wide(matrix.dtype)) if matrix.device.type == "cpu" else matrix


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of `factor`, at least in float32."""
    return left @ right if left.dtype is wide(left.dtype) else torch.mm(left, right, out_dtype=torch.float32)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices of `factor` to `total`, in the dtype of `total`."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
