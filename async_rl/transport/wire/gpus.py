"""Identifies GPUs across processes: device numbers depend on what each process may see, UUIDs do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from async_rl.transport.messages import Backend


def gpu_of(device: torch.device) -> str:
    """The GPU's UUID (`Member.gpu`); empty for a CPU."""
    if device.type != "cuda":
        return ""
    # torch does not say what the properties are
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def backend_among(gpus: Sequence[str]) -> Backend:
    """The backend for ranks with these GPUs: NCCL refuses two ranks on one GPU, and ranks without a GPU."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"
