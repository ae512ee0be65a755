"""Adam's moments in host memory between updates, and on the GPU a few parameters at a time during one.

While the compute stream updates a chunk of parameters, a copy stream brings the moments of the next and takes back those of
the one before. What the copy stream has allocated is used again in its own order, so at most two chunks are on the device.

Run on one H200, for an update by itself: docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from async_rl.plan.parameters import CHUNK
from learner.pinned_memory import PinnedMemory

Group = dict[str, Any]


@dataclass(slots=True)
class _Chunk:
    parameters: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])
    """With the number of their parameter group."""
    bytes: int = 0


class HostMoments:
    """Makes an optimizer keep the tensors of its state in host memory. Its `step` must be called on one thread."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, chunk_bytes: int = CHUNK) -> None:
        self._optimizer: Any = optimizer
        self._device, self._chunk_bytes = device, chunk_bytes
        self._copies = torch.cuda.Stream(device)
        self._update: Callable[[], object] = optimizer.step
        self._memory = PinnedMemory()
        self._optimizer.step = self._step  # Megatron calls it

    def _step(self) -> None:
        compute, steps = torch.cuda.current_stream(self._device), [*self._chunks()]
        groups = [{**group} for group in self._optimizer.param_groups]
        ready = self._bring(steps[0]) if steps else None
        for number, chunk in enumerate(steps):
            following = self._bring(steps[number + 1]) if number + 1 < len(steps) else None
            assert ready is not None
            compute.wait_event(ready)
            counted = self._update_alone(chunk, groups)
            self._take_back(chunk, compute.record_event())
            ready = following
            if following is None:
                for group, after in zip(self._optimizer.param_groups, counted, strict=True):
                    group |= {key: value for key, value in after.items() if key != "params"}
        compute.wait_stream(self._copies)  # whoever waits for the device may then read the host's copies

    def _chunks(self) -> Iterator[_Chunk]:
        chunk = _Chunk()
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                size = 2 * parameter.numel() * torch.float32.itemsize
                if chunk.parameters and chunk.bytes + size > self._chunk_bytes:
                    yield chunk
                    chunk = _Chunk()
                chunk.parameters.append((number, parameter))
                chunk.bytes += size
        if chunk.parameters:
            yield chunk

    def _update_alone(self, chunk: _Chunk, groups: list[Group]) -> list[Group]:
        """Update the chunk's parameters as if the optimizer had no others. Returns its groups afterwards: some optimizers
        count updates there.
        """
        alone = [
            {**group, "params": [each for at, each in chunk.parameters if at == number]} for number, group in enumerate(groups)
        ]
        all_groups, self._optimizer.param_groups = self._optimizer.param_groups, alone
        try:
            self._update()
        finally:
            self._optimizer.param_groups = all_groups
        return alone

    def _bring(self, chunk: _Chunk) -> Any:
        """Return the event that the moments have arrived."""
        with torch.cuda.stream(self._copies):
            for state in self._states(chunk):
                state |= {kind: each.to(self._device, non_blocking=True, copy=True) for kind, each in _moments(state)}
            return self._copies.record_event()

    def _take_back(self, chunk: _Chunk, updated: Any) -> None:
        self._copies.wait_event(updated)
        with torch.cuda.stream(self._copies):
            for _, parameter in chunk.parameters:
                state = self._optimizer.state[parameter]
                for kind, each in [*_moments(state)]:
                    state[kind] = self._memory.home((parameter, kind), each).copy_(each, non_blocking=True)
                    if each.is_cuda:  # the first update makes moments on the compute stream
                        each.record_stream(self._copies)

    def _states(self, chunk: _Chunk) -> Iterator[dict[str, Any]]:
        for _, parameter in chunk.parameters:
            if parameter in self._optimizer.state:
                yield self._optimizer.state[parameter]


def _moments(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((kind, each) for kind, each in state.items() if isinstance(each, Tensor) and each.ndim > 0)
