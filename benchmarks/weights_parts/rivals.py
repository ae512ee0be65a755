"""The methods that a push is compared with: the same bytes in one broadcast, tensor by tensor, or copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from weights_parts.models import num_bytes

PATIENCE = timedelta(minutes=5)
"""Workers take long to start where many do at once."""


class Rivals:
    """One end. Every end calls the same methods in the same order, with weights of the same sizes."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = PATIENCE
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=PATIENCE)
        self._group: Any = ProcessGroupGloo(PrefixStore("rivals", store), rank, size, options)
        self._flat: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def flat(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Seconds for one broadcast of as many bytes; laying them out flat is not counted."""
        size = num_bytes(weights)
        data = self._flat.setdefault(size, torch.ones(size, dtype=torch.uint8))
        return self._timed(lambda: self._group.broadcast(data, 0).wait())

    def one_by_one(self, weights: Mapping[str, torch.Tensor]) -> float:
        def send() -> None:
            for tensor in weights.values():
                self._group.broadcast(tensor, 0).wait()

        return self._timed(send)

    def copy(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Within this process; the others wait for the next push."""
        size = num_bytes(weights)
        data = self._flat.setdefault(size, torch.ones(size, dtype=torch.uint8))
        target = self._copies.setdefault(size, torch.zeros_like(data))
        started = time.perf_counter()
        target.copy_(data)
        return time.perf_counter() - started

    def _timed(self, send: Callable[[], None]) -> float:
        """From when all are there until this end is done."""
        self._group.barrier().wait()
        started = time.perf_counter()
        send()
        return time.perf_counter() - started
