"""One full set of parameters in memory that a worker and all its ranks see: whoever serves a version copies its part out."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from async_rl.models.parameter_spec import ParameterSpec

_ALIGNMENT = 64
"""In bytes. No number starts in the middle of another's place, whatever the types."""


class SharedWeights:
    """Anonymous memory: it has no name that could be left behind, and is gone with the last process that holds it."""

    def __init__(self, specs: Sequence[ParameterSpec], fd: int | None = None) -> None:
        """`fd` is another process' `fd`, inherited; without it the memory is made."""
        sizes = {spec.name: math.prod(spec.shape) * _dtype(spec).itemsize for spec in specs}
        total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
        if fd is None:
            fd = os.memfd_create("async-rl-weights")
            os.truncate(fd, total)
        self.fd = fd
        # Its views keep it alive: it is unmapped when the last of them is gone.
        whole = torch.frombuffer(mmap.mmap(fd, total), dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for spec in specs:
            own = whole[start : start + sizes[spec.name]]
            self.tensors[spec.name] = own.view(_dtype(spec)).view(spec.shape)
            start += -(-sizes[spec.name] // _ALIGNMENT) * _ALIGNMENT

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, place in self.tensors.items():
            place.copy_(tensors[name])

    def close(self) -> None:
        self.tensors.clear()
        os.close(self.fd)


def _dtype(spec: ParameterSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)
