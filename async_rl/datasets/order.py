"""Pure: in which order rows come. The position in a table is a number and nothing else, so a run that is resumed, or a
worker that starts later, goes on with the right row.
"""

from __future__ import annotations

import hashlib

ROUNDS = 4


class Epochs:
    """Every row once, then every row once more, each time in another order."""

    def __init__(self, size: int, *, seed: str, is_shuffled: bool) -> None:
        self._size = size
        self._seed = seed
        self._is_shuffled = is_shuffled

    def row(self, index: int) -> int:
        epoch, place = divmod(index, self._size)
        return shuffled(place, self._size, f"{self._seed}/{epoch}") if self._is_shuffled else place


def shuffled(place: int, size: int, key: str) -> int:
    """Which of `size` things comes at `place`. A permutation for each key that is computed, not stored.

    A Feistel network permutes the numbers of an even count of bits, whatever its rounds do. What falls outside `size` is
    permuted again: less than four times on average, and it comes back inside because the walk is a cycle.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_number in range(ROUNDS):
            left, right = right, left ^ (_digest(f"{key}/{round_number}/{right}") & mask)
        place = left << half | right
        if place < size:
            return place


def chance(key: str) -> float:
    """A number in [0, 1) that is the same wherever it is drawn."""
    return (_digest(key) >> 11) / (1 << 53)


def _digest(words: str) -> int:
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")
