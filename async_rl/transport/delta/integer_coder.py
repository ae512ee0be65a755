"""An adaptive arithmetic coder for lists of natural numbers that are about geometrically distributed.

As in an adaptive Golomb-Rice code, the mean of the preceding numbers gives a k. The quotient by 2^k is written in unary, as
yes-or-no decisions that are arithmetic-coded with adaptive probabilities; the remainder of k bits is stored as it is. Mean and
probabilities adapt to the numbers, so no parameters are transmitted.

Needs numba. Kernels are compiled on first use and kept on disk where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile with numba for the argument types of each call; the GIL is released while it runs."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder is writable for the cache
        return njit(nogil=True)(function)


CONTEXTS = 16  # each of the first decisions about a number has a probability of its own
CERTAIN = 65536  # probabilities are in 65536ths, means in 256ths
CHANCE_SPEED, MEAN_SPEED = 6, 5  # weight of the newest: 1 / 2^speed
LARGEST_K = 33  # the bits of a step between two float32 numbers
PATIENCE = 20  # from this quotient on the number is stored in full: its length in 6 bits, then itself
ROOM = 40  # bytes that one number needs at most in either stream
ALL_ONES = 0xFFFFFFFF


@kernel
def k_of(mean: int) -> int:
    """2^k is between half the mean and the mean: a larger k would cost bits, a smaller one time."""
    return min(bits_of(mean >> 9), LARGEST_K)


@kernel
def bits_of(number: int) -> int:
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@kernel
def encode_integers(lists: Int64s, decisions: Bytes, rests: Bytes) -> tuple[int, int]:
    """Encode the rows of `lists` into two streams; returns their lengths, (-1, -1) when the buffers are too short."""
    low, high, at = 0, ALL_ONES, 0
    held, num_held, rest_at = 0, 0, 0
    for row in range(lists.shape[0]):
        chances, mean = np.full(CONTEXTS, CERTAIN // 2, np.int64), 0
        for number in lists[row]:
            if at + ROOM > decisions.size or rest_at + ROOM > rests.size:
                return -1, -1
            k = k_of(mean)
            times = number >> k
            for decision in range(min(times + 1, PATIENCE)):
                context = min(decision, CONTEXTS - 1)
                chance = chances[context]
                middle = low + (((high - low) * chance) >> 16)
                if decision < times:
                    high = middle
                    chances[context] = chance + ((CERTAIN - chance) >> CHANCE_SPEED)
                else:
                    low = middle + 1
                    chances[context] = chance - (chance >> CHANCE_SPEED)
                while (low ^ high) >> 24 == 0:
                    decisions[at] = low >> 24
                    at += 1
                    low, high = (low << 8) & ALL_ONES, ((high << 8) & ALL_ONES) | 255
            if times >= PATIENCE:
                k = bits_of(number)
                held |= k << num_held
                num_held += 6
            held |= (number & ((1 << k) - 1)) << num_held
            num_held += k
            while num_held >= 8:
                rests[rest_at] = held & 255
                rest_at += 1
                held >>= 8
                num_held -= 8
            mean += ((number << 8) - mean) >> MEAN_SPEED
    for shift in (24, 16, 8, 0):
        decisions[at] = (low >> shift) & 255
        at += 1
    if num_held > 0:
        rests[rest_at] = held
        rest_at += 1
    return at, rest_at


@kernel
def take(wanted: int, rests: Bytes, held: int, num_held: int, rest_at: int) -> tuple[int, int, int, int]:
    """Read `wanted` bits; returns them and the new state. `rest_at` is beyond the end when there were not enough."""
    while num_held < wanted:
        if rest_at >= rests.size:
            return 0, 0, 0, rests.size + 1
        byte: Any = np.int64(rests[rest_at])
        held |= byte << num_held
        rest_at += 1
        num_held += 8
    return held & ((1 << wanted) - 1), held >> wanted, num_held - wanted, rest_at


@kernel
def decode_integers(decisions: Bytes, rests: Bytes, lists: Int64s) -> bool:
    """Fill `lists`. False when the streams are not exactly what `encode_integers` writes for lists of this shape."""
    if decisions.size < 4:
        return False
    low, high, code, at = 0, ALL_ONES, 0, 4
    for place in range(4):
        code = (code << 8) | np.int64(decisions[place])
    held, num_held, rest_at = 0, 0, 0
    for row in range(lists.shape[0]):
        chances, mean = np.full(CONTEXTS, CERTAIN // 2, np.int64), 0
        for place in range(lists.shape[1]):
            k = k_of(mean)
            times, fits = 0, True
            while times < PATIENCE:
                context = min(times, CONTEXTS - 1)
                chance = chances[context]
                middle = low + (((high - low) * chance) >> 16)
                fits = code <= middle
                if fits:
                    high = middle
                    chances[context] = chance + ((CERTAIN - chance) >> CHANCE_SPEED)
                else:
                    low = middle + 1
                    chances[context] = chance - (chance >> CHANCE_SPEED)
                while (low ^ high) >> 24 == 0:
                    if at == decisions.size:
                        return False
                    low, high = (low << 8) & ALL_ONES, ((high << 8) & ALL_ONES) | 255
                    code = ((code << 8) & ALL_ONES) | np.int64(decisions[at])
                    at += 1
                if not fits:
                    break
                times += 1
            if fits:
                times = 0
                k, held, num_held, rest_at = take(6, rests, held, num_held, rest_at)
                if k > LARGEST_K:
                    return False
            rest, held, num_held, rest_at = take(k, rests, held, num_held, rest_at)
            if rest_at > rests.size:
                return False
            number = (times << k) | rest
            lists[row, place] = number
            mean += ((number << 8) - mean) >> MEAN_SPEED
    return at == decisions.size and rest_at == rests.size
