"""One full set of parameters in memory shared by a worker and all its ranks; each rank copies its part out."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import torch
from torch import Tensor

from async_rl.models.parameter_spec import ParameterSpec

log = structlog.get_logger("rollout_workers.inference")

_ALIGNMENT = 64
"""Bytes to which every parameter is aligned, enough for any type."""


class SharedWeights:
    """Anonymous shared memory: it has no name to clean up and is freed with the last process that holds it."""

    def __init__(self, specs: Sequence[ParameterSpec], fd: int | None = None) -> None:
        """`fd` is inherited from the process that made the memory; without it the memory is made."""
        sizes = {spec.name: math.prod(spec.shape) * _dtype(spec).itemsize for spec in specs}
        total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
        if fd is None:
            fd = os.memfd_create("async-rl-weights")
            os.truncate(fd, total)
        self.fd = fd
        # Tensors are views of it: it is unmapped with the last of them.
        self._whole = whole = torch.frombuffer(mmap.mmap(fd, total), dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for spec in specs:
            own = whole[start : start + sizes[spec.name]]
            self.tensors[spec.name] = own.view(_dtype(spec)).view(spec.shape)
            start += -(-sizes[spec.name] // _ALIGNMENT) * _ALIGNMENT

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, place in self.tensors.items():
            place.copy_(tensors[name])

    @contextmanager
    def pinned(self, device: torch.device) -> Generator[None]:
        """Let a GPU read the memory itself while inside: from other memory its driver copies first. Not run on GPUs yet."""
        is_pinned = device.type == "cuda" and self._pin(device)
        try:
            yield
        finally:
            if is_pinned:
                _runtime().cudaHostUnregister(self._whole.data_ptr())

    def _pin(self, device: torch.device) -> bool:
        runtime, portable = _runtime(), 1
        error = runtime.cudaHostRegister(self._whole.data_ptr(), self._whole.nbytes, portable)
        if error == runtime.cudaError.success:
            return True
        log.warning("received weights are not pinned: staging them is slower", reason=runtime.cudaGetErrorString(error))
        with suppress(RuntimeError):  # CUDA keeps the error, and torch would raise it for the next kernel: here is one
            torch.zeros(1, device=device)
        return False

    def close(self) -> None:
        self.tensors.clear()
        del self._whole
        os.close(self.fd)


def _runtime() -> Any:
    return torch.cuda.cudart()


def _dtype(spec: ParameterSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)
