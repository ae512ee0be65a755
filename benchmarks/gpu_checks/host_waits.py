"""Counts how often the host waits for the device within a piece of work."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from gpu_checks.report import Figure, Machine

WAIT = "called a synchronizing"


def host_waits(machine: Machine, work: Callable[[], object]) -> Figure:
    """Return the number of waits that torch knows of; on a CPU nothing can wait."""
    if not machine.is_gpu:
        work()
        return "not counted (no GPU)"
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return float(sum(WAIT in str(each.message) for each in seen))
