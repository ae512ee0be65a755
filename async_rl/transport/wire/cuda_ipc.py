"""Shares a GPU's memory with other processes of the machine, with CUDA IPC handles serialized as JSON.

The handles come from torch. Nothing here orders reads and writes, or keeps the owner from freeing the memory: it has finished
writing when it tells the address. A sender's readers hold a lock (shared_memory.py); ranks of engines are done when they have
answered their worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Base64Bytes, BaseModel, ConfigDict

from async_rl.transport.wire.gpus import gpu_of

_NO_COUNTER = b"/async-rl-counts-no-readers"
"""Name of a file that does not exist: torch subtracts a reader there when the memory is closed, and ignores that it cannot."""

_NO_EVENT = b""
"""The event of the memory's first writes would be opened each time, and never closed."""


class _CudaHandle(BaseModel):
    """Everything another process needs to open the memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu: str
    handle: Base64Bytes
    num_bytes: int
    offset: int


def describe(data: torch.Tensor) -> bytes:
    """A handle to the memory, as JSON. Raises RuntimeError where the system cannot share a GPU's memory."""
    storage: Any = data.untyped_storage()  # torch's stubs leave these methods out
    _, handle, num_bytes, offset, counter, counter_offset, *_ = storage._share_cuda_()
    # torch counts one reader from here on, and never frees memory that none or several have opened
    storage._release_ipc_counter_cuda(counter, counter_offset)
    told = _CudaHandle.model_construct(gpu=gpu_of(data.device), handle=handle, num_bytes=num_bytes, offset=offset)
    return told.model_dump_json().encode()


def open_handle(handle: bytes, devices: Iterable[torch.device]) -> torch.Tensor | None:
    """The shared memory as a tensor; None if it is on none of the devices. Raises RuntimeError or ValueError when it cannot be
    opened.
    """
    told = _CudaHandle.model_validate_json(handle)
    device = next((each for each in devices if told.gpu and told.gpu == gpu_of(each)), None)
    if device is None:
        return None
    torch.cuda.init()
    kind: Any = torch.UntypedStorage
    number = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    storage = kind._new_shared_cuda(number, told.handle, told.num_bytes, told.offset, _NO_COUNTER, 0, _NO_EVENT, False)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
