"""Sparse deltas of a parcel that lies on the device: how long they take, how small they are, and whether they are exact."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gpu_checks.ceilings import copy_bytes_per_s, seconds_of
from gpu_checks.one_check import Skipped
from gpu_checks.report import Checks, Machine, Report
from torch import Tensor

from async_rl.transport.delta import codec
from async_rl.transport.delta.parcel_delta import DeltaPiece, apply_piece, encoded_piece

LEARNING_RATE = 1e-6
STD = 0.02
"""Standard deviation of the weights."""


def delta(machine: Machine, report: Report) -> None:
    """bfloat16 weights after one update whose steps are about as large as the learning rate, as Adam's are.

    What senders do (`encode`): the parcel comes to the host and is encoded there, on threads. Beside it a scan in plain torch
    on the device (`scan`), which finds the changes and collects them.
    """
    if not codec.is_available():
        raise Skipped("numba (the extra delta) is not installed")
    codec.warm_up()
    old, new = _weights(machine, 1 << 28 if machine.is_gpu else 1 << 20)
    size = old.numel()
    pieces = [
        DeltaPiece(start=start, stop=min(start + codec.CHUNK_BYTES, size), dtype="bfloat16")
        for start in range(0, size, codec.CHUNK_BYTES)
    ]
    ceiling = copy_bytes_per_s(machine)
    report.note(copy_gb_s=ceiling / 1e9, parcel_mb=size / 1e6, changed=_changed(old, new))

    made: list[bytes] = []
    image = old.clone()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:

        def encode() -> None:
            made[:] = threads.map(lambda piece: encoded_piece(piece, old, new), pieces)

        def apply() -> None:
            image.copy_(old)
            machine.synchronize()
            deltas = [np.frombuffer(each, np.uint8) for each in made]
            list(threads.map(lambda piece, delta: apply_piece(piece, delta, image), pieces, deltas))

        encode_s = seconds_of(machine, encode, repeats=3, warm_up=1)
        apply_s = seconds_of(machine, apply, repeats=3, warm_up=1)
    report.note(times_smaller=size / sum(map(len, made)), encode_s=encode_s, encode_gb_s=size / encode_s / 1e9)
    report.note(apply_gb_s=size / apply_s / 1e9)
    report.require(torch.equal(image, new), "a delta applied to the old weights did not give the new ones")

    scan_s = seconds_of(machine, lambda: _scan(old, new))
    report.note(scan_gb_s=2 * size / scan_s / 1e9, scan_of_copy_bandwidth=2 * size / scan_s / ceiling)
    report.note(of_copy_bandwidth=2 * size / encode_s / ceiling)


def _weights(machine: Machine, count: int) -> tuple[Tensor, Tensor]:
    """Bytes of the weights before and after."""
    random = torch.Generator(machine.device).manual_seed(3)
    before = torch.randn(count, generator=random, device=machine.device).mul_(STD)
    after = before + torch.randn(count, generator=random, device=machine.device).mul_(LEARNING_RATE)
    return before.bfloat16().view(torch.uint8), after.bfloat16().view(torch.uint8)


def _changed(old: Tensor, new: Tensor) -> float:
    return (old.view(torch.int16) != new.view(torch.int16)).float().mean().item()


def _scan(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    after = new.view(torch.int16)
    places = (old.view(torch.int16) != after).nonzero()[:, 0]
    return places, after[places]


CHECKS: Checks = {"delta": delta}
