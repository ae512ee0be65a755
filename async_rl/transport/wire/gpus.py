"""Identifies GPUs across processes, for process groups among them: device numbers depend on what each process may see, UUIDs do
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from async_rl.transport.messages import Backend


def gpu_of(device: torch.device) -> str:
    """The GPU's UUID; empty for a CPU."""
    if device.type != "cuda":
        return ""
    # torch does not say what the properties are
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def gpus_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """The UUIDs for `Member.gpus`; none unless all devices are GPUs."""
    gpus = tuple(gpu_of(device) for device in devices)
    return gpus if all(gpus) else ()


def gpu_name(device: torch.device | str) -> str:
    """The GPU's model; empty for a CPU."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""


def backend_among(gpus: Sequence[str]) -> Backend:
    """The backend for ranks with these GPUs: NCCL refuses two ranks on one GPU, and ranks without a GPU."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def takes_turns(backend: Backend) -> bool:
    """Whether parcels are sent one after the other, in the order of their numbers.

    Each parcel has a group of its own. NCCL may hang when a GPU takes part in several groups and not all of their members run
    the operations in the same order.
    """
    return backend == "nccl"
