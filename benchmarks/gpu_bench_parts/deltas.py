"""Sparse deltas of a parcel that lies on the device: how long they take, how small they are, and whether they are exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gpu_checks.ceilings import copy_bytes_per_s, seconds_of
from gpu_checks.report import Checks, Machine, Report
from torch import Tensor

from async_rl.transport.delta import compact_codec
from async_rl.transport.delta.parcel_delta import Encoding, apply_piece, encoded_piece, num_threads, split_bytes

LEARNING_RATE = 1e-6
STD = 0.02
"""Standard deviation of the weights."""


def delta(machine: Machine, report: Report) -> None:
    """bfloat16 weights after one update whose steps are about as large as the learning rate, as Adam's are.

    Encoded and applied where they lie (`parallel`), as a learner on a GPU and its workers do; with numba beside it as on a CPU
    (`compact`), from memory of the host.
    """
    old, new = _weights(machine, 1 << 28 if machine.is_gpu else 1 << 20)
    ceiling = copy_bytes_per_s(machine)
    report.note(copy_gb_s=ceiling / 1e9, parcel_mb=len(old) / 1e6, changed=_changed(old, new))
    smaller, encode_s, apply_s = _figures(machine, report, old, new, "parallel")
    report.note(times_smaller=smaller, encode_s=encode_s, encode_gb_s=len(old) / encode_s / 1e9)
    report.note(apply_gb_s=len(old) / apply_s / 1e9, of_copy_bandwidth=2 * len(old) / encode_s / ceiling)
    if compact_codec.is_available():
        compact_codec.warm_up()
        smaller, encode_s, apply_s = _figures(machine, report, old.cpu(), new.cpu(), "compact")
        report.note(compact_times_smaller=smaller, compact_encode_gb_s=len(old) / encode_s / 1e9)
        report.note(compact_apply_gb_s=len(old) / apply_s / 1e9)


def _figures(machine: Machine, report: Report, old: Tensor, new: Tensor, encoding: Encoding) -> tuple[float, float, float]:
    """How many times smaller the deltas are, and the seconds to encode and to apply them, on as many threads as a push uses."""
    pieces = split_bytes(0, len(old), "bfloat16", encoding)
    made: list[bytes] = []
    image = old.clone()
    with ThreadPoolExecutor(num_threads(pieces)) as threads:

        def encode() -> None:
            made[:] = threads.map(lambda piece: encoded_piece(piece, old, new), pieces)

        def apply() -> None:
            image.copy_(old)
            machine.synchronize()
            deltas = [np.frombuffer(each, np.uint8) for each in made]
            list(threads.map(lambda piece, delta: apply_piece(piece, delta, image), pieces, deltas))

        encode_s = seconds_of(machine, encode, repeats=3, warm_up=1)
        apply_s = seconds_of(machine, apply, repeats=3, warm_up=1)
    report.require(torch.equal(image, new), f"a {encoding} delta applied to the old weights did not give the new ones")
    return len(old) / sum(map(len, made)), encode_s, apply_s


def _weights(machine: Machine, count: int) -> tuple[Tensor, Tensor]:
    """Bytes of the weights before and after."""
    random = torch.Generator(machine.device).manual_seed(3)
    before = torch.randn(count, generator=random, device=machine.device).mul_(STD)
    after = before + torch.randn(count, generator=random, device=machine.device).mul_(LEARNING_RATE)
    return before.bfloat16().view(torch.uint8), after.bfloat16().view(torch.uint8)


def _changed(old: Tensor, new: Tensor) -> float:
    return (old.view(torch.int16) != new.view(torch.int16)).float().mean().item()


CHECKS: Checks = {"delta": delta}
