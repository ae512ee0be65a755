"""Blocks of the KV cache that several requests may read at once, because they begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron import host

with host.importing():
    from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator

Name = bytes
"""Stands for the tokens of a full block and all tokens before it."""


def names_of(tokens: Sequence[int], block_tokens: int, known: Sequence[Name] = ()) -> list[Name]:
    """The names of all full blocks of `tokens`, of which the first ones may be known."""
    names = list(known)
    row = np.array(tokens, dtype=np.int64)
    for start in range(len(names) * block_tokens, len(row) - block_tokens + 1, block_tokens):
        before = names[-1] if names else b""
        names.append(blake2b(before + row[start : start + block_tokens].tobytes(), digest_size=16).digest())
    return names


class SharedBlocks(BlockAllocator):
    """Counts who holds a block. One that has a name stays in memory when nobody holds it, until its room is needed.

    `total_avail`, which Megatron reads, counts both the blocks that are free and those that only wait to be found again.
    """

    def __init__(self, context: Any, total_count: int, paused_count: int) -> None:
        super().__init__(context, total_count, paused_count)
        self.reset()

    def reset(self) -> None:
        self._free = list(reversed(range(self.total_count - 1)))  # the last block is Megatron's, for padding
        self._holders = [0] * self.total_count
        self._named: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._idle: dict[int, None] = {}
        """Named blocks that nobody holds, the longest unused first."""
        self.total_avail = self.total_count - 1

    def find(self, names: Iterable[Name]) -> list[int]:
        """The blocks of the longest known beginning."""
        found: list[int] = []
        for name in names:
            if (block := self._named.get(name)) is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
                self.total_avail -= 1
            self._holders[block] += 1

    def name(self, blocks: Iterable[int], names: Iterable[Name]) -> None:
        """Let them be found from now on. Where a name is taken, the block that has it stays the one that is found."""
        for block, name in zip(blocks, names, strict=False):
            if name not in self._named and block not in self._names:
                self._named[name] = block
                self._names[block] = name

    def forget(self) -> None:
        """Nobody finds anything that was written until now; who holds it keeps it."""
        self._free += self._idle
        self._idle.clear()
        self._named.clear()
        self._names.clear()

    # -- what Megatron calls --------------------------------------------------------------------------------------------

    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        if num_blocks > self.total_avail:
            return None
        taken = [self._free.pop() if self._free else self._reclaim() for _ in range(num_blocks)]
        for block in taken:
            self._holders[block] = 1
        self.total_avail -= num_blocks
        return torch.tensor(taken, dtype=torch.int32, device=self.block_bag.device)

    def release_memory_blocks(self, blocks: Tensor) -> None:
        # From the last one back: what is reclaimed first should be the end of a prefix, never its beginning.
        for block in reversed(blocks.tolist()):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self.total_avail += 1
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def get_active_avail(self) -> int:
        """Megatron asks how many blocks paused requests may take; it counts shared ones more than once, and would evict
        requests for nothing. Whoever is paused for a moment has had its block set aside (SchedulingEngine), so: enough.
        """
        return self.total_count * self.context.max_requests

    def _reclaim(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        del self._named[self._names.pop(block)]
        return block
