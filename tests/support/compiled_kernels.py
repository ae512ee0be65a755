"""Triton kernels compiled for GPUs that are not here: everything up to the launch, with the real arguments, is as on a GPU.

with compiling_for("H100") as kernels:
    paged_attention(...)    # on tensors in the CPU's memory; they are not touched
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

GPUS = {"A100": (80, 163 * 1024), "H100": (90, 227 * 1024)}
"""Compute capability, and the most shared memory of a program."""
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel's use of a processor, as ptxas says."""

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    """Of registers that did not suffice, per thread."""


class _Driver:
    """Stands in for the CUDA driver: it loads a kernel by reading its use of resources, and launches nothing."""

    def __init__(self, capability: int, shared_bytes: int) -> None:
        self.kernels: list[CompiledKernel] = []
        self._capability = capability
        properties = {"max_shared_mem": shared_bytes}
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda _: properties)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_: None

    def _load(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[Any, ...]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            said = subprocess.check_output([_TOOL, "--dump-resource-usage", file.name], text=True)
        use = {what: int(number) for what, number in re.findall(r"(\w+):(\d+)", said.partition("Function")[2])}
        spilled = use["STACK"] + use["LOCAL"]
        self.kernels.append(CompiledKernel(name=name, shared_bytes=shared_bytes, registers=use["REG"], spilled_bytes=spilled))
        return None, None, use["REG"], use["STACK"], 1024


@contextmanager
def compiling_for(gpu: str) -> Iterator[list[CompiledKernel]]:
    """Compile kernels that are called inside, and list those that were not compiled before. Raises what Triton raises."""
    stands_in: Any = _Driver(*GPUS[gpu])
    before = driver._active
    driver.set_active(stands_in)
    try:
        yield stands_in.kernels
    finally:
        driver._active = before
