"""Which GPUs are one and the same: device numbers depend on what each process may see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from async_rl.transport.messages import Backend


def gpu_of(device: torch.device) -> str:
    """What `Member.gpu` holds."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def backend_among(gpus: Sequence[str]) -> Backend:
    """For ranks with these GPUs: NCCL refuses two on one GPU, and has no place for a rank without one."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"
