"""What this device can do at most, measured: the denominators of every fraction that is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from gpu_checks.report import Machine


def seconds_of(machine: Machine, work: Callable[[], object], *, repeats: int = 5, warm_up: int = 2) -> float:
    """Return the median time of `work`, until the device is done."""
    for _ in range(warm_up):
        work()
    spent: list[float] = []
    for _ in range(repeats):
        machine.synchronize()
        started = time.perf_counter()
        work()
        machine.synchronize()
        spent.append(time.perf_counter() - started)
    return median(spent)


def copy_bytes_per_s(machine: Machine) -> float:
    """Measure a copy on the device, counting what is read and what is written: the memory's bandwidth."""
    size = 4 << 30 if machine.is_gpu else 16 << 20  # on a GPU far larger than its cache
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(machine, lambda: target.copy_(source))


def product_flops_per_s(machine: Machine, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure a square matrix product of random values, which zeros would flatter."""
    width = 8192 if machine.is_gpu else 256
    left, right = (torch.randn(width, width, device=machine.device).to(dtype) for _ in range(2))
    return 2 * width**3 / seconds_of(machine, lambda: left @ right)


def from_device_bytes_per_s(machine: Machine, *, pinned: bool) -> float:
    size = 512 << 20 if machine.is_gpu else 8 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=machine.device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and machine.is_gpu)
    return size / seconds_of(machine, lambda: target.copy_(source, non_blocking=pinned))


def to_device_bytes_per_s(machine: Machine, *, pinned: bool) -> float:
    size = 512 << 20 if machine.is_gpu else 8 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    source = source.pin_memory() if pinned and machine.is_gpu else source
    target = torch.empty(size, dtype=torch.uint8, device=machine.device)
    return size / seconds_of(machine, lambda: target.copy_(source, non_blocking=pinned))
