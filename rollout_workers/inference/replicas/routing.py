"""Pure: which replica gets a generation. The least loaded, unless another one knows the prompt's beginning already."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

REMEMBERED = 1 << 16
"""Beginnings of prompts; the ones that were not asked for longest are forgotten."""

SLACK = 8
"""Generations that a replica may be ahead of the least loaded before it gets no more for knowing their prompts."""


class Router:
    """Engines reuse whole blocks of a prompt's keys and values, so beginnings are told apart block by block."""

    def __init__(self, *, replicas: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Which replica last had a prompt that begins like this."""
        self._loads = [0] * replicas

    @property
    def loads(self) -> Sequence[int]:
        """Generations that each replica has."""
        return self._loads

    def choose(self, prompt: Sequence[int]) -> int:
        """Count a generation to a replica, and say which."""
        beginnings = list(self._beginnings(prompt))
        chosen = self._choose(beginnings)
        self._loads[chosen] += 1
        for beginning in beginnings:
            self._seen[beginning] = chosen
            self._seen.move_to_end(beginning)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return chosen

    def ended(self, replica: int) -> None:
        self._loads[replica] -= 1

    def _choose(self, beginnings: Sequence[int]) -> int:
        least = min(self._loads)
        for beginning in reversed(beginnings):
            if (known := self._seen.get(beginning)) is not None:
                return known if self._loads[known] <= least + SLACK else self._loads.index(least)
        return self._loads.index(least)

    def _beginnings(self, prompt: Sequence[int]) -> Iterator[int]:
        """A number for each beginning of whole blocks, from the shortest to the longest."""
        number, ids = 0, np.array(prompt, np.int32)
        for stop in range(self._block_tokens, len(ids) + 1, self._block_tokens):
            number = zlib.crc32(ids[stop - self._block_tokens : stop].tobytes(), number)
            yield number
