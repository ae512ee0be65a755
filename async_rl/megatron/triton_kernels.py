"""Whether Triton is installed: not everyone has it, so modules with its kernels are imported late."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda" and has_triton()
