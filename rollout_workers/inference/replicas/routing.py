"""Pure: choose the replica for a generation: the least loaded, unless another has a prefix of the prompt cached."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

REMEMBERED = 1 << 16
"""Number of prompt prefixes remembered; the least recently used are forgotten."""

SLACK = 8
"""How many generations more than the least loaded a replica may have and still be chosen for its cache."""


class Router:
    """Tracks loads and prompt prefixes. Engines reuse whole blocks of the KV cache, so prefixes are whole blocks."""

    def __init__(self, *, replicas: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: OrderedDict[int, int] = OrderedDict()
        """The replica that last had a prompt with this prefix, by the prefix' checksum."""
        self._loads = [0] * replicas

    @property
    def loads(self) -> Sequence[int]:
        """Number of generations of each replica."""
        return self._loads

    def choose(self, prompt: Sequence[int]) -> int:
        """Choose a replica and count the generation there."""
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
        """Count the end of a generation."""
        self._loads[replica] -= 1

    def _choose(self, beginnings: Sequence[int]) -> int:
        least = min(self._loads)
        for beginning in reversed(beginnings):
            if (known := self._seen.get(beginning)) is not None:
                return known if self._loads[known] <= least + SLACK else self._loads.index(least)
        return self._loads.index(least)

    def _beginnings(self, prompt: Sequence[int]) -> Iterator[int]:
        """A checksum of each prefix of whole blocks, from the shortest to the longest."""
        number, ids = 0, np.array(prompt, np.int32)
        for stop in range(self._block_tokens, len(ids) + 1, self._block_tokens):
            number = zlib.crc32(ids[stop - self._block_tokens : stop].tobytes(), number)
            yield number
