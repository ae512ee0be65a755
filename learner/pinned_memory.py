"""Pinned host memory for tensors that stay there: many share a block, because torch pins a power of 2 of bytes for each."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

BLOCK = 2**28
"""Bytes of a block, unless there are few yet or a tensor needs more."""
_ALIGNMENT = 64
"""Bytes to which tensors are aligned, enough for any dtype."""


class PinnedMemory:
    """Memory by key. It is kept, because pinning is slow."""

    def __init__(self, *, block_bytes: int = BLOCK) -> None:
        self._block_bytes, self._taken = block_bytes, 0
        self._homes: dict[Hashable, Tensor] = {}
        self._rests: list[Tensor] = []
        """The free ends of blocks."""

    def home(self, key: Hashable, like: Tensor) -> Tensor:
        """Return the memory of a key: of the shape and dtype of the first tensor, and pinned if that is on a GPU."""
        if key not in self._homes:
            self._homes[key] = self._take(like)
        return self._homes[key]

    def __len__(self) -> int:
        return len(self._homes)

    def _take(self, like: Tensor) -> Tensor:
        size = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        place = next((place for place, rest in enumerate(self._rests) if len(rest) >= size), None)
        if place is None:
            block = max(_power_of_2(size), min(_power_of_2(self._taken), self._block_bytes))
            place = len(self._rests)
            self._rests.append(torch.empty(block, dtype=torch.uint8, device="cpu", pin_memory=like.is_cuda))
        rest = self._rests[place]
        self._rests[place] = rest[size:]
        self._taken += size
        return rest[: like.nbytes].view(like.dtype).view(like.shape)


def _power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is not less."""
    return 1 << max(size - 1, 0).bit_length()
