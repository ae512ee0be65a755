"""Whether Triton is installed: not everyone has it, so modules with its kernels are imported late."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch

Choice = Literal["auto", "torch"]
_choice: Choice = "auto"


def choose(kernels: Choice) -> None:
    """Let the models of this process use Triton's kernels where they run (`auto`), or never (`torch`)."""
    global _choice  # one for all models of a rank, as torch's deterministic algorithms are
    _choice = kernels


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device, and are wanted."""
    return _choice == "auto" and device.type == "cuda" and has_triton()
