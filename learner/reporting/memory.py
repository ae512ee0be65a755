"""The memory that rank 0 takes: metrics of each step."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_metrics(device: str) -> dict[str, float]:
    """Return the memory of this process, and the most that its tensors took on the GPU since the previous call."""
    row = {"memory/host": float(_resident_bytes())}
    if torch.device(device).type == "cuda":
        row["memory/gpu"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return row


def _resident_bytes() -> int:
    """Return the resident memory now; where /proc is missing, its maximum."""
    if not _STATM.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
