"""Prefix caching: KV blocks shared by requests that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron import host
from async_rl.megatron.engine.sending import sent

with host.importing():
    from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator

BlockHash = bytes
"""Hash of the tokens of a full block and of all tokens before it."""


def block_hashes(tokens: Sequence[int], block_tokens: int, known: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`; `known` are those of the first blocks."""
    names = list(known)
    row = np.array(tokens, dtype=np.int64)
    for start in range(len(names) * block_tokens, len(row) - block_tokens + 1, block_tokens):
        before = names[-1] if names else b""
        names.append(blake2b(before + row[start : start + block_tokens].tobytes(), digest_size=16).digest())
    return names


class SharedBlocks(BlockAllocator):
    """A block allocator with reference counts. A hashed block stays cached without holders until its space is needed.

    `total_avail`, which Megatron reads, counts free blocks and cached blocks without holders.
    """

    def __init__(self, context: Any, total_count: int, paused_count: int) -> None:
        super().__init__(context, total_count, paused_count)
        self.reset()

    def reset(self) -> None:
        self._free = list(reversed(range(self.total_count - 1)))  # the last block is Megatron's, for padding
        self._holders = [0] * self.total_count
        self._named: dict[BlockHash, int] = {}
        self._names: dict[int, BlockHash] = {}
        self._idle: dict[int, None] = {}
        """Cached blocks without holders, least recently used first."""
        self.total_avail = self.total_count - 1

    def find(self, names: Iterable[BlockHash]) -> list[int]:
        """The cached blocks of the longest known prefix."""
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

    def take(self, number: int) -> list[int]:
        """Take blocks for a holder, at most `total_avail`."""
        taken = [self._free.pop() if self._free else self._reclaim() for _ in range(number)]
        for block in taken:
            self._holders[block] = 1
        self.total_avail -= number
        return taken

    def name(self, blocks: Iterable[int], names: Iterable[BlockHash]) -> None:
        """Register blocks under their hashes. If a hash is registered already, its block is kept."""
        for block, name in zip(blocks, names, strict=False):
            if name not in self._named and block not in self._names:
                self._named[name] = block
                self._names[block] = name

    def forget(self) -> None:
        """Unregister all blocks; holders keep theirs."""
        self._free += self._idle
        self._idle.clear()
        self._named.clear()
        self._names.clear()

    # -- what Megatron calls --------------------------------------------------------------------------------------------

    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        return sent(self.take(num_blocks), torch.int32, self.block_bag.device) if num_blocks <= self.total_avail else None

    def release_memory_blocks(self, blocks: Tensor) -> None:
        # In reverse, so that the end of a prefix is evicted before its beginning.
        for block in reversed(blocks.tolist()):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self.total_avail += 1
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def get_active_avail(self) -> int:
        """Blocks available to paused requests, for Megatron. Always enough: SchedulingEngine has reserved theirs, while
        Megatron counts shared blocks repeatedly and would evict requests needlessly.
        """
        return self.total_count * self.context.max_requests

    def _reclaim(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        del self._named[self._names.pop(block)]
        return block
