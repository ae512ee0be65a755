"""The order of rows, computed from an index alone, so that a resumed run or a late worker continues with the right row."""

from __future__ import annotations

import hashlib

ROUNDS = 4


class Epochs:
    """Epochs over the rows of a dataset, each in another order if shuffled."""

    def __init__(self, size: int, *, seed: str, is_shuffled: bool) -> None:
        self._size = size
        self._seed = seed
        self._is_shuffled = is_shuffled

    def row(self, index: int) -> int:
        epoch, place = divmod(index, self._size)
        return shuffled(place, self._size, f"{self._seed}/{epoch}") if self._is_shuffled else place


def shuffled(place: int, size: int, key: str) -> int:
    """The element at `place` of a permutation of `size` elements, determined by `key` and computed without storing it.

    A Feistel network is a permutation of numbers with an even number of bits. A result outside of `size` is permuted again
    (cycle walking), less than four times on average.
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
    """A pseudo-random number in [0, 1), determined by the key."""
    return (_digest(key) >> 11) / (1 << 53)


def _digest(words: str) -> int:
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")
