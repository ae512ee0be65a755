"""Tensor-parallel ranks execute the same calls in lockstep: rank 0 decides and forwards each call before it acts.

engine thread of rank 0                   ranks 1 ...
submit, cancel, stage, swap, step ──────▶ the same calls, in the same order
   ◀── WeightsLoaded, after a swap ──────

No tokens are sent. All ranks gather equal logits and sample with equal random generators. Each step carries a checksum
of the state before it, and a rank whose state differs stops.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from async_rl.errors import ServiceStopped
from async_rl.types import Completion
from rollout_workers.inference.engine_core import EngineCore, OpenWeights
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.replicas.frames import (
    CancelRequest,
    SocketPipe,
    StageWeights,
    StepOrder,
    Submit,
    Swap,
    WeightsLoaded,
)
from rollout_workers.inference.replicas.shared_weights import SharedVersion, WeightReader


class LockstepCore(EngineCore):
    """An EngineCore with a checksum of its state."""

    def state(self) -> int:
        """Checksum of the version, the running generations and their newest tokens."""
        running = self._sampler.running.values()
        newest = ((each.id, len(each.token_ids), each.token_ids[-1] if each.token_ids else -1) for each in running)
        numbers = [self.version, *(number for each in newest for number in each)]
        return zlib.crc32(np.array(numbers).tobytes())


class LeadingCore(LockstepCore):
    """The core of rank 0: forwards every call to the followers."""

    def __init__(self, followers: Sequence[SocketPipe], **arguments: Any) -> None:
        self._followers = followers
        super().__init__(**arguments)

    def submit(self, generation: Generation) -> None:
        self._tell(Submit(id=generation.id, prompt=generation.prompt, sampling=generation.sampling))
        super().submit(generation)

    def cancel(self, generation: Generation) -> None:
        self._tell(CancelRequest(id=generation.id))
        super().cancel(generation)

    def begin_stage(self, weights: OpenWeights) -> Future[Mapping[str, Tensor]]:
        assert isinstance(weights, SharedVersion), "a worker describes weights to its ranks"
        self._tell(StageWeights(parcels=weights.told))
        return super().begin_stage(weights)

    def swap(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        self._tell(Swap(version=number))
        try:
            super().swap(number, tensors)
        finally:  # the caller may overwrite `tensors` once this returns
            for rank, follower in enumerate(self._followers, start=1):
                if not isinstance(follower.receive(), WeightsLoaded):
                    raise ServiceStopped(f"tensor rank {rank} is gone")

    def step(self) -> None:
        if self._followers:
            self._tell(StepOrder(state=self.state()))
        super().step()

    def _tell(self, order: object) -> None:
        for follower in self._followers:
            follower.send(order)


def follow(core: LockstepCore, leader: SocketPipe, reader: WeightReader) -> None:
    """Execute the orders of rank 0 until it closes its socket."""
    running: dict[int, Generation] = {}
    staging: Future[Mapping[str, Tensor]] | None = None
    while (order := leader.receive()) is not None:
        match order:
            case Submit():
                running[order.id] = _as_told(order, running)
                core.submit(running[order.id])
            case CancelRequest():
                if (generation := running.pop(order.id, None)) is not None:
                    core.cancel(generation)
            case StageWeights():
                staging = core.begin_stage(SharedVersion(order.parcels, reader))
            case Swap():
                assert staging is not None, "rank 0 stages what it swaps"
                with suppress(ValueError):  # rank 0 refuses the same, and says so
                    core.swap(order.version, staging.result())
                staging = None  # or it would keep the worker's memory
                leader.send(WeightsLoaded())
            case StepOrder():
                if order.state != core.state():
                    raise ServiceStopped("this tensor rank has come to other tokens than rank 0")
                core.step()
            case _:
                raise TypeError(f"rank 0 gave an unknown order: {order!r}")


def _as_told(order: Submit, running: dict[int, Generation]) -> Generation:
    def finish(_: Completion) -> None:
        del running[order.id]

    return Generation(id=order.id, prompt=order.prompt, sampling=order.sampling, finish=finish)
